#include "face.hpp"

#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/record_function.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>

#include "core.hpp"
#include "lazy.hpp"
#include "ordered.hpp"
#include "rendezvous_store.hpp"
#include "store.hpp"

namespace podring {

using c10d::OpType;

TpuBackend::TpuBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       c10::intrusive_ptr<Options> options)
    : Backend(rank, size), options_(std::move(options)), who_{rank, size, options_->group_name} {
  init();
  if (size <= 0 || rank < 0 || rank >= size) {
    raise(PODRING_INVALID,
          c10::str("group ", who_.group, ": expected a rank from 0 to size - 1, got rank ", rank, " of ", size));
  }
  const auto& members = options_->global_ranks_in_group;
  if (!members.empty() && members.size() != static_cast<size_t>(size)) {
    raise(PODRING_INVALID,
          c10::str("group ", who_.group, ": expected the global ranks of ", size, " members, got ", members.size()));
  }
  const std::vector<uint32_t> ranks = global_ranks();

  PodringGroupConfig config{};
  config.rank = static_cast<uint32_t>(rank);
  config.size = static_cast<uint32_t>(size);
  config.name = who_.group.c_str();
  config.global_ranks = members.empty() ? nullptr : ranks.data();
  config.timeout_ms = options_->timeout.count();
  Interrupt interrupt;
  config.interrupted = &Interrupt::asked;
  config.interrupted_ctx = &interrupt;

  Error error;
  int32_t status = PODRING_OK;
  {
    const LockReleased unlocked;
    const StoreAdapter::Forming forming(*store);
    config.store = StoreAdapter::make(store);
    status = core->group_create(&config, &group_, &error);
  }
  interrupt.check(status, error);
}

TpuBackend::~TpuBackend() {
  if (group_ != nullptr) core->group_free(group_);
}

// Starting operations.

template <class Fill>
c10::intrusive_ptr<c10d::Work> TpuBackend::run(Op op, Fill fill) {
  try {
    Call call(who_, op);
    fill(call);
    return launch(call);
  } catch (...) {
    if (open_batches_.load(std::memory_order_relaxed) != 0) take_batch();
    throw;
  }
}

c10::intrusive_ptr<c10d::Work> TpuBackend::launch(Call& call) {
  if (shut_down_.load(std::memory_order_relaxed)) call.refuse(PODRING_ABORTED, "the group was shut down");
  if (C10_UNLIKELY(open_batches_.load(std::memory_order_relaxed) != 0)) {
    if (Batch* batch = open_batch()) return add_to_batch(*batch, call);
  }
  if (C10_UNLIKELY(at::hasCallbacks())) return launch_profiled(call);
  auto work = c10::make_intrusive<FaceWork>(rank_, call.op().type, nullptr, std::nullopt);
  submit(call, *work, !call.op().async);
  if (call.op().async) work->watch_for_settling();
  return work;
}

void TpuBackend::submit(Call& call, FaceWork& work, bool sync) {
  const PodringCollective collective = call.collective(sync);
  work.lend(call.take_lent());
  work.hold(call.take_inputs(), call.take_outputs());
  work.post(group_, collective);
}

namespace {

int64_t elements(const Tensors& tensors) {
  int64_t sum = 0;
  for (const at::Tensor& tensor : tensors) sum += tensor.numel();
  return sum;
}

// How far apart the ranks are, if equally: what the profiler shows as the group's stride.
int stride_of(const std::vector<uint64_t>& ranks) {
  if (ranks.size() < 2) return 1;
  const auto stride = static_cast<int64_t>(ranks[1]) - static_cast<int64_t>(ranks[0]);
  for (size_t i = 2; i < ranks.size(); ++i) {
    if (static_cast<int64_t>(ranks[i]) - static_cast<int64_t>(ranks[i - 1]) != stride) return -1;
  }
  return static_cast<int>(stride);
}

}  // namespace

// Two rows, as torch's own backends write them: "<name>:<operation>" from start to end with the tensors' shapes, and
// record_param_comms with group and sizes.
c10::intrusive_ptr<c10d::Work> TpuBackend::launch_profiled(Call& call) {
  const Op& op = call.op();
  const bool p2p = c10d::isP2POp(op.type);
  const TensorVector inputs(call.inputs().begin(), call.inputs().end());
  const TensorVector outputs(call.outputs().begin(), call.outputs().end());
  const TensorVector& shown = inputs.empty() ? outputs : inputs;
  const auto& members = options_->global_ranks_in_group;
  RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP(
      std::make_tuple(static_cast<int64_t>(core->group_sequence(group_)), p2p), std::make_tuple(pg_uid_, pg_desc_),
      shown, outputs, p2p ? static_cast<int>(op.root) : rank_, op.name,
      inputs.empty() ? elements(call.outputs()) : elements(call.inputs()), elements(call.outputs()),
      shown.empty() ? at::kByte : shown.front().scalar_type(), std::vector<int64_t>{}, std::vector<int64_t>{},
      members.empty() ? 0 : static_cast<int>(members.front()), stride_of(members), size_, op.async);

  const std::string title = options_->backend + ":" + op.name;
  auto work = c10::make_intrusive<FaceWork>(rank_, op.type, title.c_str(), shown);
  submit(call, *work, !op.async);
  work->watch_for_profiler();
  if (op.async) work->watch_for_settling();
  return work;
}

// Batches.

Batch* TpuBackend::open_batch() {
  const std::lock_guard<std::mutex> lock(batches_mutex_);
  for (const auto& batch : batches_) {
    if (batch->thread == std::this_thread::get_id()) return batch.get();
  }
  return nullptr;
}

std::unique_ptr<Batch> TpuBackend::take_batch() {
  const std::lock_guard<std::mutex> lock(batches_mutex_);
  for (auto batch = batches_.begin(); batch != batches_.end(); ++batch) {
    if ((*batch)->thread != std::this_thread::get_id()) continue;
    std::unique_ptr<Batch> taken = std::move(*batch);
    batches_.erase(batch);
    open_batches_.fetch_sub(1, std::memory_order_relaxed);
    taken->work->set_open(false);
    return taken;
  }
  return nullptr;
}

void TpuBackend::startCoalescing() {
  const std::unique_ptr<Batch> left_open = take_batch();
  if (left_open && !left_open->calls.empty()) {
    raise(PODRING_INVALID, c10::str("startCoalescing on rank ", who_.rank, " of ", who_.size, " (group ", who_.group,
                                    "): the batch before was never ended; its collectives are dropped"));
  }
  auto batch = std::make_unique<Batch>();
  batch->thread = std::this_thread::get_id();
  const std::string title = at::hasCallbacks() ? options_->backend + ":coalesced" : std::string();
  batch->work =
      c10::make_intrusive<FaceWork>(rank_, OpType::COALESCED, title.empty() ? nullptr : title.c_str(), std::nullopt);
  batch->work->set_open(true);
  const std::lock_guard<std::mutex> lock(batches_mutex_);
  batches_.push_back(std::move(batch));
  open_batches_.fetch_add(1, std::memory_order_relaxed);
}

c10::intrusive_ptr<c10d::Work> TpuBackend::add_to_batch(Batch& batch, Call& call) {
  if (c10d::isP2POp(call.op().type)) {
    submit(call, *batch.work, false);
  } else {
    batch.work->hold(call.inputs(), call.outputs());
    // `calls` points into what is lent by its address, which moving does not change.
    batch.work->lend(call.take_lent());
    if (!batch.calls.empty() && batch.calls.back().joins(call)) {
      batch.calls.back().join(call);
    } else {
      batch.calls.push_back(std::move(call));
    }
  }
  return batch.work;
}

c10::intrusive_ptr<c10d::Work> TpuBackend::endCoalescing() {
  const std::unique_ptr<Batch> batch = take_batch();
  if (!batch) {
    raise(PODRING_INVALID, c10::str("endCoalescing on rank ", who_.rank, " of ", who_.size, " (group ", who_.group,
                                    "): no batch is open on this thread"));
  }
  for (Call& call : batch->calls) batch->work->post(group_, call.collective(false));
  batch->work->watch_for_profiler();
  batch->work->watch_for_settling();
  return batch->work;
}

// Reductions.

c10::intrusive_ptr<c10d::Work> TpuBackend::allreduce(TensorVector& tensors, const c10d::AllreduceOptions& opts) {
  if (tensors.size() == 1 && tensors.front().is_sparse()) return allreduce_sparse(tensors, opts);
  return run({PODRING_ALL_REDUCE, OpType::ALLREDUCE, "all_reduce", opts.timeout, opts.asyncOp}, [&](Call& call) {
    const at::Tensor& tensor = call.only(tensors, "tensor");
    call.begin(tensor, opts.reduceOp);
    call.updates(tensor);
  });
}

c10::intrusive_ptr<c10d::Work> TpuBackend::allreduce_coalesced(TensorVector& tensors,
                                                               const c10d::AllreduceCoalescedOptions& opts) {
  return run({PODRING_ALL_REDUCE, OpType::ALLREDUCE_COALESCED, "all_reduce", opts.timeout, opts.asyncOp},
             [&](Call& call) {
               if (tensors.empty()) call.refuse(PODRING_INVALID, "expected at least one tensor, got none");
               for (const at::Tensor& tensor : tensors) {
                 call.begin(tensor, opts.reduceOp);
                 call.updates(tensor);
               }
             });
}

c10::intrusive_ptr<c10d::Work> TpuBackend::broadcast(TensorVector& tensors, const c10d::BroadcastOptions& opts) {
  return run({PODRING_BROADCAST, OpType::BROADCAST, "broadcast", opts.timeout, opts.asyncOp, opts.rootRank},
             [&](Call& call) {
               const at::Tensor& tensor = call.only(tensors, "tensor");
               call.expect_rank(opts.rootRank, "root");
               if (opts.rootTensor != 0) {
                 call.refuse(PODRING_INVALID, "invalid root tensor: ", opts.rootTensor, " (expected 0)");
               }
               call.begin(tensor);
               call.shares(tensor);
             });
}

c10::intrusive_ptr<c10d::Work> TpuBackend::reduce(TensorVector& tensors, const c10d::ReduceOptions& opts) {
  return run({PODRING_REDUCE, OpType::REDUCE, "reduce", opts.timeout, opts.asyncOp, opts.rootRank}, [&](Call& call) {
    const at::Tensor& tensor = call.only(tensors, "tensor");
    call.expect_rank(opts.rootRank, "root");
    if (opts.rootTensor != 0) {
      call.refuse(PODRING_INVALID, "invalid root tensor: ", opts.rootTensor, " (expected 0)");
    }
    call.begin(tensor, opts.reduceOp);
    if (opts.rootRank == rank_) {
      call.updates(tensor);
    } else {
      call.reads(tensor);
    }
  });
}

c10::intrusive_ptr<c10d::Work> TpuBackend::reduce_scatter(TensorVector& outputs, Lists& inputs,
                                                          const c10d::ReduceScatterOptions& opts) {
  return run({PODRING_REDUCE_SCATTER, OpType::REDUCE_SCATTER, "reduce_scatter", opts.timeout, opts.asyncOp},
             [&](Call& call) {
               const at::Tensor& output = call.only(outputs, "output tensor");
               call.begin(output, opts.reduceOp);
               call.reads(call.list(inputs, "input tensors, one per rank"));
               call.writes(output);
             });
}

c10::intrusive_ptr<c10d::Work> TpuBackend::reduce_scatter_single(at::Tensor& output, at::Tensor& input,
                                                                 const c10d::ReduceScatterOptions& opts) {
  return run(
      {PODRING_REDUCE_SCATTER, OpType::_REDUCE_SCATTER_BASE, "reduce_scatter_tensor", opts.timeout, opts.asyncOp},
      [&](Call& call) {
        call.begin(output, opts.reduceOp);
        call.reads_blocks(input, output);
        call.writes(output);
      });
}

c10::intrusive_ptr<c10d::Work> TpuBackend::reduce_scatter_single_coalesced(TensorVector& outputs, TensorVector& inputs,
                                                                           const c10d::ReduceScatterOptions& opts) {
  return run({PODRING_REDUCE_SCATTER, OpType::REDUCE_SCATTER_TENSOR_COALESCED, "reduce_scatter_tensor_coalesced",
              opts.timeout, opts.asyncOp},
             [&](Call& call) {
               if (outputs.empty()) call.refuse(PODRING_INVALID, "expected at least one output tensor, got none");
               call.expect_length(inputs.size(), outputs.size(), "input tensors, one per output");
               for (size_t i = 0; i < outputs.size(); ++i) {
                 call.begin(outputs[i], opts.reduceOp);
                 call.reads_blocks(inputs[i], outputs[i]);
                 call.writes(outputs[i]);
               }
             });
}

// Gathering.

c10::intrusive_ptr<c10d::Work> TpuBackend::allgather(Lists& outputs, TensorVector& inputs,
                                                     const c10d::AllgatherOptions& opts) {
  return run({PODRING_ALL_GATHER, OpType::ALLGATHER, "all_gather", opts.timeout, opts.asyncOp}, [&](Call& call) {
    const at::Tensor& input = call.only(inputs, "input tensor");
    call.begin(input);
    call.reads(input);
    call.writes(call.list(outputs, "output tensors, one per rank"));
  });
}

// outputs[rank][i] takes that rank's inputs[i].
c10::intrusive_ptr<c10d::Work> TpuBackend::allgather_coalesced(Lists& outputs, TensorVector& inputs,
                                                               const c10d::AllgatherOptions& opts) {
  return run({PODRING_ALL_GATHER, OpType::ALLGATHER_COALESCED, "all_gather", opts.timeout, opts.asyncOp},
             [&](Call& call) {
               if (inputs.empty()) call.refuse(PODRING_INVALID, "expected at least one input tensor, got none");
               call.expect_length(outputs.size(), static_cast<size_t>(size_), "output lists, one per rank");
               for (const auto& list : outputs) {
                 call.expect_length(list.size(), inputs.size(), "output tensors in each list, one per input");
               }
               Tensors blocks(static_cast<size_t>(size_));
               for (size_t i = 0; i < inputs.size(); ++i) {
                 for (size_t rank = 0; rank < outputs.size(); ++rank) blocks[rank] = outputs[rank][i];
                 call.begin(inputs[i]);
                 call.reads(inputs[i]);
                 call.writes(blocks);
               }
             });
}

c10::intrusive_ptr<c10d::Work> TpuBackend::all_gather_single(at::Tensor& output, at::Tensor& input,
                                                             const c10d::AllgatherOptions& opts) {
  return run({PODRING_ALL_GATHER, OpType::_ALLGATHER_BASE, "all_gather_into_tensor", opts.timeout, opts.asyncOp},
             [&](Call& call) {
               call.begin(input);
               call.reads(input);
               call.writes_blocks(output, input);
             });
}

c10::intrusive_ptr<c10d::Work> TpuBackend::all_gather_single_coalesced(TensorVector& outputs, TensorVector& inputs,
                                                                       const c10d::AllgatherOptions& opts) {
  return run({PODRING_ALL_GATHER, OpType::ALLGATHER_INTO_TENSOR_COALESCED, "all_gather_into_tensor_coalesced",
              opts.timeout, opts.asyncOp},
             [&](Call& call) {
               if (inputs.empty()) call.refuse(PODRING_INVALID, "expected at least one input tensor, got none");
               call.expect_length(outputs.size(), inputs.size(), "output tensors, one per input");
               for (size_t i = 0; i < inputs.size(); ++i) {
                 call.begin(inputs[i]);
                 call.reads(inputs[i]);
                 call.writes_blocks(outputs[i], inputs[i]);
               }
             });
}

c10::intrusive_ptr<c10d::Work> TpuBackend::gather(Lists& outputs, TensorVector& inputs,
                                                  const c10d::GatherOptions& opts) {
  return run({PODRING_GATHER, OpType::GATHER, "gather", opts.timeout, opts.asyncOp, opts.rootRank}, [&](Call& call) {
    const at::Tensor& input = call.only(inputs, "input tensor");
    call.expect_rank(opts.rootRank, "root");
    call.begin(input);
    call.reads(input);
    if (opts.rootRank == rank_) {
      call.writes(call.list(outputs, "output tensors on the root, one per rank"));
    } else {
      call.expect_length(outputs.size(), 0, "output lists on a rank that is not the root");
    }
  });
}

c10::intrusive_ptr<c10d::Work> TpuBackend::gather_single(at::Tensor& output, at::Tensor& input,
                                                         const c10d::GatherOptions& opts) {
  return run({PODRING_GATHER, OpType::GATHER, "gather", opts.timeout, opts.asyncOp, opts.rootRank}, [&](Call& call) {
    call.expect_rank(opts.rootRank, "root");
    call.begin(input);
    call.reads(input);
    if (opts.rootRank == rank_) call.writes_blocks(output, input);
  });
}

c10::intrusive_ptr<c10d::Work> TpuBackend::scatter(TensorVector& outputs, Lists& inputs,
                                                   const c10d::ScatterOptions& opts) {
  return run({PODRING_SCATTER, OpType::SCATTER, "scatter", opts.timeout, opts.asyncOp, opts.rootRank}, [&](Call& call) {
    const at::Tensor& output = call.only(outputs, "output tensor");
    call.expect_rank(opts.rootRank, "root");
    call.begin(output);
    if (opts.rootRank == rank_) {
      call.reads(call.list(inputs, "input tensors on the root, one per rank"));
    } else {
      call.expect_length(inputs.size(), 0, "input lists on a rank that is not the root");
    }
    call.writes(output);
  });
}

// All to all.

c10::intrusive_ptr<c10d::Work> TpuBackend::alltoall(TensorVector& outputs, TensorVector& inputs,
                                                    const c10d::AllToAllOptions& opts) {
  return run({PODRING_ALL_TO_ALL, OpType::ALLTOALL, "all_to_all", opts.timeout, opts.asyncOp}, [&](Call& call) {
    call.expect_length(outputs.size(), static_cast<size_t>(size_), "output tensors, one per rank");
    call.expect_length(inputs.size(), static_cast<size_t>(size_), "input tensors, one per rank");
    call.begin(inputs.front());
    call.reads(inputs);
    call.writes(outputs);
  });
}

c10::intrusive_ptr<c10d::Work> TpuBackend::all_to_all_single(at::Tensor& output, at::Tensor& input,
                                                             std::vector<int64_t>& output_splits,
                                                             std::vector<int64_t>& input_splits,
                                                             const c10d::AllToAllOptions& opts) {
  return run({PODRING_ALL_TO_ALL, OpType::ALLTOALL_BASE, "all_to_all", opts.timeout, opts.asyncOp}, [&](Call& call) {
    call.begin(input);
    call.reads_splits(input, input_splits);
    call.writes_splits(output, output_splits);
  });
}

// Point to point.

c10::intrusive_ptr<c10d::Work> TpuBackend::send(TensorVector& tensors, int destination, int tag) {
  return run({PODRING_SEND, OpType::SEND, "send", c10d::kUnsetTimeout, true, destination, tag}, [&](Call& call) {
    const at::Tensor& tensor = call.only(tensors, "tensor");
    call.expect_rank(destination, "destination");
    if (tag < 0) call.refuse(PODRING_INVALID, "invalid tag: ", tag, " (expected 0 or more)");
    call.begin(tensor);
    call.reads(tensor);
  });
}

c10::intrusive_ptr<c10d::Work> TpuBackend::recv(TensorVector& tensors, int source, int tag) {
  return run({PODRING_RECV, OpType::RECV, "recv", c10d::kUnsetTimeout, true, source, tag}, [&](Call& call) {
    const at::Tensor& tensor = call.only(tensors, "tensor");
    call.expect_rank(source, "source");
    if (tag < 0) call.refuse(PODRING_INVALID, "invalid tag: ", tag, " (expected 0 or more)");
    call.begin(tensor);
    call.writes(tensor);
  });
}

c10::intrusive_ptr<c10d::Work> TpuBackend::recvAnysource(TensorVector& tensors, int tag) {
  return run({PODRING_RECV, OpType::RECVANYSOURCE, "recvAnySource", c10d::kUnsetTimeout, true, -1, tag},
             [&](Call& call) {
               const at::Tensor& tensor = call.only(tensors, "tensor");
               if (tag < 0) call.refuse(PODRING_INVALID, "invalid tag: ", tag, " (expected 0 or more)");
               call.begin(tensor);
               call.writes(tensor);
             });
}

// Barriers.

c10::intrusive_ptr<c10d::Work> TpuBackend::barrier(const c10d::BarrierOptions& opts) {
  return run({PODRING_BARRIER, OpType::BARRIER, "barrier", opts.timeout, opts.asyncOp}, [&](Call& call) {
    // c10d hands on the indices of devices alone; a process has one device beside the CPU.
    if (!opts.device_ids.empty()) call.runs_on_device();
  });
}

void TpuBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  const int64_t timeout = opts.timeout == c10d::kUnsetTimeout ? core->group_timeout(group_) : opts.timeout.count();
  Error error;
  Interrupt interrupt;
  int32_t status = PODRING_OK;
  {
    const LockReleased unlocked;
    status =
        core->group_monitored_barrier(group_, timeout, wait_all_ranks ? 1 : 0, &Interrupt::asked, &interrupt, &error);
  }
  interrupt.check(status, error);
}

// Sparse tensors: every rank's indices and values are gathered, and each rank adds them up in rank order.

namespace {

constexpr int64_t kHeader = 4;    // non-zero elements, sparse dimensions, dense dimensions, dtype; then the sizes
constexpr int64_t kMaxDims = 64;  // torch's own limit

at::Tensor describe_sparse(const at::Tensor& tensor) {
  auto about = std::vector<int64_t>(kHeader + kMaxDims, 0);
  about[0] = tensor._nnz();
  about[1] = tensor.sparse_dim();
  about[2] = tensor.dense_dim();
  about[3] = static_cast<int64_t>(tensor.scalar_type());
  std::copy(tensor.sizes().begin(), tensor.sizes().end(), about.begin() + kHeader);
  return at::tensor(about, at::kLong);
}

// Narrow floats are added up in f32, as dense ones are.
at::ScalarType accumulates_in(at::ScalarType type) {
  return type == at::kHalf || type == at::kBFloat16 ? at::kFloat : type;
}

}  // namespace

c10::intrusive_ptr<c10d::Work> TpuBackend::allreduce_sparse(TensorVector& tensors, const c10d::AllreduceOptions& opts) {
  const Call call(who_, {PODRING_ALL_GATHER, OpType::_ALLREDUCE_SPARSE, "sparse_all_reduce", opts.timeout});
  const at::Tensor& tensor = call.only(tensors, "tensor");
  if (!tensor.is_sparse()) {
    call.refuse(PODRING_UNSUPPORTED, "expected a COO tensor, got one of layout ", tensor.layout());
  }
  if (!tensor.device().is_cpu()) {
    call.refuse(PODRING_UNSUPPORTED, "expected a tensor on cpu, got one on ", tensor.device());
  }
  if (opts.reduceOp.op_ != c10d::ReduceOp::SUM) {
    call.refuse(PODRING_UNSUPPORTED, "sparse tensors can be reduced with SUM only, got reduction ",
                int{opts.reduceOp.op_});
  }
  if (open_batch() != nullptr) {
    call.refuse(PODRING_UNSUPPORTED, "a sparse tensor can't be part of a coalesced operation");
  }
  const at::NoGradGuard no_grad;
  const at::Tensor mine = tensor.coalesce();

  c10d::AllgatherOptions gather;
  gather.timeout = opts.timeout;
  gather.asyncOp = false;

  at::Tensor my_description = describe_sparse(mine);
  at::Tensor descriptions = at::empty({size_, kHeader + kMaxDims}, at::kLong);
  all_gather_single(descriptions, my_description, gather)->wait();

  Lists indices(1);
  Lists values(1);
  const auto theirs = descriptions.accessor<int64_t, 2>();
  for (int rank = 0; rank < size_; ++rank) {
    if (!descriptions[rank].slice(0, 1).equal(my_description.slice(0, 1))) {
      call.refuse(PODRING_MISMATCH, "rank ", rank, " has a sparse tensor of ", theirs[rank][1], " sparse and ",
                  theirs[rank][2], " dense dimensions, sizes ",
                  at::IntArrayRef(&theirs[rank][kHeader], theirs[rank][1] + theirs[rank][2]), ", dtype ",
                  static_cast<at::ScalarType>(theirs[rank][3]), "; here ", mine.sparse_dim(), " and ", mine.dense_dim(),
                  ", ", mine.sizes(), ", ", mine.scalar_type());
    }
    const int64_t nnz = theirs[rank][0];
    std::vector<int64_t> shape = mine.values().sizes().vec();
    shape.front() = nnz;
    indices.front().push_back(at::empty({mine.sparse_dim(), nnz}, at::kLong));
    values.front().push_back(at::empty(shape, mine.values().options()));
  }
  TensorVector my_indices{mine.indices().contiguous()};
  TensorVector my_values{mine.values().contiguous()};
  const WorkPtr first = allgather(indices, my_indices, gather);
  const WorkPtr second = allgather(values, my_values, gather);
  first->wait();
  second->wait();

  const auto wide = accumulates_in(mine.scalar_type());
  const at::Tensor all =
      at::_sparse_coo_tensor_unsafe(at::cat(indices.front(), 1), at::cat(values.front(), 0).to(wide), mine.sizes());
  const at::Tensor sum = all.coalesce();
  tensor.copy_(sum.to(mine.scalar_type()));

  auto work = c10::make_intrusive<FaceWork>(rank_, OpType::_ALLREDUCE_SPARSE, nullptr, std::nullopt);
  work->hold({}, Tensors(tensors.begin(), tensors.end()));
  return work;
}

// The group.

std::vector<uint32_t> TpuBackend::global_ranks() const {
  std::vector<uint32_t> ranks;
  for (const uint64_t rank : options_->global_ranks_in_group) ranks.push_back(static_cast<uint32_t>(rank));
  if (ranks.empty()) {
    for (int rank = 0; rank < size_; ++rank) ranks.push_back(static_cast<uint32_t>(rank));
  }
  return ranks;
}

c10::intrusive_ptr<c10d::Backend> TpuBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                    const std::vector<int>& ranks,
                                                    const c10::intrusive_ptr<Options>& opts) {
  const auto mine = std::find(ranks.begin(), ranks.end(), rank_);
  if (mine == ranks.end()) return nullptr;
  const std::vector<uint32_t> members = global_ranks();
  const auto options = (opts ? opts : options_)->clone();
  options->global_ranks_in_group.clear();
  for (const int rank : ranks) {
    if (rank < 0 || rank >= size_) {
      raise(PODRING_INVALID, c10::str("split on rank ", who_.rank, " of ", who_.size, " (group ", who_.group,
                                      "): expected ranks from 0 to ", size_ - 1, ", got ", rank));
    }
    options->global_ranks_in_group.push_back(members[static_cast<size_t>(rank)]);
  }
  return c10::make_intrusive<TpuBackend>(store, static_cast<int>(mine - ranks.begin()), static_cast<int>(ranks.size()),
                                         options);
}

void TpuBackend::lend_world() const {
  if (core->size < offsetof(PodringCore, device_world) + sizeof(core->device_world)) {
    raise(PODRING_UNSUPPORTED, "podring's core is older than its face: install both from one build");
  }
  core->device_world(group_);
}

uint64_t TpuBackend::warm_up(const std::vector<PodringSized>& calls) const {
  if (core->size < offsetof(PodringCore, group_warm_up) + sizeof(core->group_warm_up)) {
    raise(PODRING_UNSUPPORTED, "podring's core is older than its face: install both from one build");
  }
  Error error;
  uint64_t ready = 0;
  int32_t status = PODRING_OK;
  {
    const LockReleased unlocked;
    status = core->group_warm_up(group_, calls.data(), calls.size(), &ready, &error);
  }
  if (status != PODRING_OK) raise(status, error.message());
  return ready;
}

void TpuBackend::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  core->group_set_timeout(group_, timeout.count());
}

c10d::ErrorType TpuBackend::getError() {
  Error error;
  switch (core->group_error(group_, &error)) {
    case PODRING_OK:
      return c10d::ErrorType::SUCCESS;
    case PODRING_TIMEOUT:
      return c10d::ErrorType::TIMEOUT;
    case PODRING_PEER_LOST:
      return c10d::ErrorType::REMOTE_ERROR;
    default:
      return c10d::ErrorType::COMM_ERROR;
  }
}

void TpuBackend::abort() { core->group_abort(group_, c10::str("abort() was called on rank ", who_.rank).c_str()); }

void TpuBackend::shutdown() {
  if (shut_down_.exchange(true)) return;
  const LockReleased unlocked;
  core->group_shutdown(group_);
}

std::unordered_map<std::string, uint64_t> TpuBackend::getMemoryStats() {
  std::unordered_map<std::string, uint64_t> stats;
  if (core->size < offsetof(PodringCore, group_memory) + sizeof(core->group_memory))
    return Backend::getMemoryStats();  // refuses
  core->group_memory(
      group_,
      [](void* into, const char* name, uint64_t bytes) {
        (*static_cast<std::unordered_map<std::string, uint64_t>*>(into))[name] = bytes;
      },
      &stats);
  return stats;
}

// The Python module.

namespace {

namespace py = pybind11;

c10::intrusive_ptr<c10d::Backend> create(const c10d::DistributedBackendOptions& opts, const py::object& given,
                                         const std::string& name) {
  auto options = given.is_none() ? c10::make_intrusive<c10d::Backend::Options>(name)
                                 : given.cast<c10::intrusive_ptr<c10d::Backend::Options>>()->clone();
  options->timeout = std::chrono::milliseconds(std::llround(static_cast<double>(opts.timeout.count()) * 1000.0));
  options->group_name = opts.group_id;
  options->global_ranks_in_group.assign(opts.global_ranks_in_group.begin(), opts.global_ranks_in_group.end());
  return c10::make_intrusive<TpuBackend>(opts.store, opts.group_rank, opts.group_size, std::move(options));
}

// Calls to come: kind, dtype, reduction, bytes.
using Sized = std::tuple<uint32_t, at::ScalarType, c10d::ReduceOp, uint64_t>;

uint64_t warm_up(const TpuBackend& backend, const std::vector<Sized>& calls) {
  std::vector<PodringSized> sized;
  for (const auto& [kind, dtype, reduction, bytes] : calls) {
    const uint8_t code = dtype_of(dtype);
    if (code == kNoDType) raise(PODRING_UNSUPPORTED, c10::str("warm_up: dtype ", dtype, " is not supported"));
    sized.push_back({kind, code, static_cast<uint8_t>(reduction.op_), bytes});
  }
  return backend.warm_up(sized);
}

// Before the interpreter ends. True if nothing of the core's runs in it any more.
bool drain(double seconds) {
  const auto timeout = std::chrono::milliseconds(std::llround(seconds * 1000.0));
  const LockReleased unlocked;
  const bool drained = core->drain(timeout.count()) == 0;
  return ExitGate::close(timeout) && drained;
}

void take_core() {
  const py::object capsule = py::module_::import("podring._core").attr("abi");
  const auto* table = static_cast<const PodringCore*>(PyCapsule_GetPointer(capsule.ptr(), PODRING_CAPSULE));
  if (table == nullptr) throw py::error_already_set();
  if (table->abi != PODRING_ABI || table->size < offsetof(PodringCore, group_memory)) {
    throw py::import_error(c10::str("podring's core speaks ABI ", table->abi, " (", table->size,
                                    " bytes), this torch face ABI ", PODRING_ABI, " (at least ",
                                    offsetof(PodringCore, group_memory), " bytes): install both from one build"));
  }
  core = table;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "podring's c10d face, for torch " TORCH_VERSION;
  py::module_::import("torch._C._distributed_c10d");
  take_core();
  ExitGate::follow_forks();
  m.attr("torch_version") = TORCH_VERSION;
  // torch asks a group that is bound to a device, on the ranks that a new subgroup leaves out, for this.
  py::class_<TpuBackend, c10::intrusive_ptr<TpuBackend>, c10d::Backend>(m, "TpuBackend")
      .def(
          "perform_nocolor_split", [](TpuBackend&, const py::object&) {}, py::arg("device"),
          "Nothing: a subgroup is formed by its members alone.");
  m.def("create", &create, py::arg("opts"), py::arg("backend_options") = py::none(), py::arg("name") = "tpu",
        "The backend for one group; forms the group with its other members.");
  RendezvousStore::add_to(m);
  m.def(
      "set_torch_tpu", [](const std::string& version) { device::Bridge::version() = version; }, py::arg("version"),
      "Says which torch_tpu there is: of the versions that are known, tensors' memory is used as it is.");
  m.def(
      "lend_world", [](const TpuBackend& backend) { backend.lend_world(); }, py::arg("backend"),
      "Has collectives inside of programs on virtual chips run over this group, whose members are all ranks in order.");
  m.def("ordered_store", &OrderedStore::over, py::arg("store"),
        "The store by which torch_tpu's process group has each message find its own receive.");
  m.def("warm_up", &warm_up, py::arg("backend"), py::arg("calls"),
        "Compiles the programs of (kind, dtype, reduction, bytes) to come; of how many calls they are there.");
  m.def("drain", &drain, py::arg("timeout"),
        "Ends callbacks into the interpreter; False if some still run after `timeout` seconds.");
}

}  // namespace podring
