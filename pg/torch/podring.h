// The C ABI between podring's core (Rust) and its faces. Plain data only: nothing is thrown or unwound across it.
//
// The core hands out one PodringCore table through the PyCapsule "podring._core.abi"; whoever takes it must find
// `abi` equal to PODRING_ABI and `size` at least sizeof(PodringCore). Functions may be called from any thread, with or
// without the interpreter lock; none takes that lock itself, except through callbacks that the caller supplied.
#pragma once
// clang-format off: laid out by hand
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PODRING_ABI 1
#define PODRING_CAPSULE "podring._core.abi"

// Results: PODRING_OK, or the kind of error that was written to the PodringError.
enum PodringStatus {
  PODRING_OK = 0,
  PODRING_INVALID = 1,      // the request is wrong by itself: ValueError
  PODRING_UNSUPPORTED = 2,  // right, but not to be had here: NotImplementedError
  PODRING_TIMEOUT = 3,      // DistBackendError
  PODRING_PEER_LOST = 4,    // DistBackendError
  PODRING_MISMATCH = 5,     // ranks called different things: DistBackendError
  PODRING_ABORTED = 6,      // aborted, closed, or failed before: DistBackendError
  PODRING_STORE = 7,        // the launcher's store: DistStoreError
  PODRING_NETWORK = 8,      // DistNetworkError
  PODRING_INTERNAL = 9,     // a bug of podring's, caught: DistBackendError
  PODRING_INTERRUPTED = 10, // the interrupted() callback said so; its own exception is pending
  PODRING_QUEUE_EMPTY = 11, // kv_call: QueueEmptyError
};

// An error's text, owned by the core: error_free releases it. `message` is UTF-8 with a terminating NUL, or null.
typedef struct PodringError {
  int32_t status;
  char* message;
} PodringError;

typedef struct PodringGroup PodringGroup;
typedef struct PodringWork PodringWork;

// Asked about ten times a second in anything that waits: nonzero ends the wait with PODRING_INTERRUPTED. May be null.
typedef int32_t (*PodringInterrupted)(void* ctx);

// The launcher's store as the caller has it. Each call returns 0, or nonzero after writing a NUL-terminated reason into
// `why` (at most `why_size` bytes, NUL included). Keys are byte strings without NUL. Calls may come from any thread, one
// at a time.
typedef struct PodringStore {
  void* ctx;
  int32_t (*set)(void* ctx, const char* key, const uint8_t* value, size_t len, char* why, size_t why_size);
  // The value of a key that exists: hands it to sink(sink_ctx, value, len) once, before returning.
  int32_t (*get)(void* ctx, const char* key, void (*sink)(void*, const uint8_t*, size_t), void* sink_ctx, char* why,
                 size_t why_size);
  // *present = 1 if all n keys exist, else 0. Never waits.
  int32_t (*check)(void* ctx, const char* const* keys, size_t n, int32_t* present, char* why, size_t why_size);
  // Adds to a counter and gives its new value.
  int32_t (*add)(void* ctx, const char* key, int64_t amount, int64_t* value, char* why, size_t why_size);
  // Called once, when the core needs the store no more.
  void (*release)(void* ctx);
} PodringStore;

typedef struct PodringGroupConfig {
  uint32_t rank;
  uint32_t size;
  const char* name;              // c10d's group name (group_id): the same on all members, unique in the job at a time
  const uint32_t* global_ranks;  // size entries: each member's rank in the default group; null: 0..size
  int64_t timeout_ms;            // default for operations, and for forming the group
  PodringStore store;            // a store private to this group (c10d's PrefixStore)
  PodringInterrupted interrupted;
  void* interrupted_ctx;
} PodringGroupConfig;

// Bits of PodringTensor.flags.
#define PODRING_CONJ 1u  // torch's lazy conjugate bit is set
#define PODRING_NEG 2u   // torch's lazy negative bit is set

typedef struct PodringTensor {
  void* data;              // address of element [0, 0, …]; may be null when there are no elements
  const int64_t* sizes;    // elements per dimension
  const int64_t* strides;  // in elements
  uint32_t dims;
  uint32_t flags;
} PodringTensor;

// One side of a part, seen as blocks in rank order. counts null: every tensor is one block. Otherwise there is one
// tensor, cut into blocks of counts[i] elements.
typedef struct PodringSide {
  const PodringTensor* tensors;
  uint64_t n_tensors;
  const uint64_t* counts;
  uint64_t n_counts;
} PodringSide;

#define PODRING_NO_REDUCTION 255u

typedef struct PodringPart {
  uint8_t dtype;      // see PodringDType
  uint8_t reduction;  // c10d's ReduceOp order: SUM 0 AVG 1 PRODUCT 2 MIN 3 MAX 4 BAND 5 BOR 6 BXOR 7 PREMUL_SUM 8
  double factor;      // PREMUL_SUM's
  PodringSide inputs;
  PodringSide outputs;
} PodringPart;

enum PodringDType {
  PODRING_U8 = 0, PODRING_I8 = 1, PODRING_I16 = 2, PODRING_I32 = 3, PODRING_I64 = 4, PODRING_U16 = 5,
  PODRING_U32 = 6, PODRING_U64 = 7, PODRING_BOOL = 8, PODRING_F16 = 9, PODRING_BF16 = 10, PODRING_F32 = 11,
  PODRING_F64 = 12, PODRING_C64 = 13, PODRING_C128 = 14, PODRING_F8E4M3FN = 15, PODRING_F8E5M2 = 16,
  PODRING_F8E4M3FNUZ = 17, PODRING_F8E5M2FNUZ = 18, PODRING_F8E8M0FNU = 19, PODRING_C32 = 20,
};

// What each kind reads (inputs) and writes (outputs), in blocks; n is the group's size. In-place operations name the
// same tensor on both sides.
//   all_reduce      in 1, out 1            broadcast   in 1, out 1 (the same tensor on both sides, on every rank)
//   reduce          in 1, root: out 1      all_gather  in 1, out n
//   reduce_scatter  in n, out 1            all_to_all  in n, out n
//   gather          in 1, root: out n      scatter     root: in n; out 1
//   barrier         no parts               send        in 1               recv   out 1
enum PodringKind {
  PODRING_ALL_REDUCE = 0, PODRING_BROADCAST = 1, PODRING_REDUCE = 2, PODRING_ALL_GATHER = 3,
  PODRING_REDUCE_SCATTER = 4, PODRING_ALL_TO_ALL = 5, PODRING_GATHER = 6, PODRING_SCATTER = 7, PODRING_BARRIER = 8,
  PODRING_SEND = 9, PODRING_RECV = 10,
};

// Bit of PodringCollective.flags: the caller waits for the work at once, so nobody else need be woken to drive it.
#define PODRING_SYNC 1u
// The tensors stand for tensors of a device: the group's device engine takes the operation, where there is one and it
// has a program for it.
#define PODRING_DEVICE 2u

typedef struct PodringCollective {
  uint32_t kind;
  int32_t root;        // root, or the peer of send and recv; -1 with recv: from any rank. Ranks within the group
  uint32_t tag;        // send and recv
  uint32_t n_parts;    // several: a coalesced operation, one launch, all parts of the same kind
  const PodringPart* parts;
  int64_t timeout_ms;  // <= 0: the group's
  uint32_t flags;      // PODRING_SYNC, PODRING_DEVICE
} PodringCollective;

// A call to come.
typedef struct PodringSized {
  uint32_t kind;      // PodringKind, but gather, scatter, send and recv
  uint8_t dtype;      // PodringDType
  uint8_t reduction;  // as in PodringPart; of what reduces
  uint64_t bytes;     // of the largest buffer of a rank
} PodringSized;

// A buffer's memory.
typedef struct PodringMemory {
  void* data;
  uint64_t bytes;
  uint8_t dtype;  // PodringDType, or 255 for one that no collective knows
} PodringMemory;

// A client of a coordinator's key-value store. Thread-safe; a forked child may use it too.
typedef struct PodringKv PodringKv;

// PodringKvConfig.serve
enum PodringKvServe {
  PODRING_KV_CLIENT = 0,  // the coordinator is somebody else's
  PODRING_KV_SERVE = 1,   // start it at the endpoint, in this process; an error if somebody listens there
  PODRING_KV_SHARE = 2,   // the same, or use whoever listens there
};

// Bit of PodringKvConfig.flags: serve beyond this host with neither token nor certificates.
#define PODRING_KV_INSECURE 1u

typedef struct PodringKvConfig {
  const char* endpoint;  // host:port, an IPv6 literal in brackets; port 0 only to serve: a free one
  uint32_t serve;
  uint32_t flags;
  const char* token;        // from here on: null or empty where there is none
  const char* token_file;
  const char* tls_ca;       // the three together
  const char* tls_cert;
  const char* tls_key;
  const char* server_name;  // in the coordinator's certificate, if it isn't the endpoint's host
  const char* state_dir;    // serve: where the store survives the process
  int64_t timeout_ms;       // to connect; <= 0: for ever
  PodringInterrupted interrupted;
  void* interrupted_ctx;
} PodringKvConfig;

typedef struct PodringBytes {
  const uint8_t* data;
  size_t len;
} PodringBytes;

// What each takes and gives; keys are UTF-8. "number" is PodringKvCall.number or *number, "gives" goes to the sink.
enum PodringKvOp {
  PODRING_KV_SET = 0,          // a key, a value
  PODRING_KV_GET = 1,          // a key; gives its value; waits
  PODRING_KV_WAIT = 2,         // keys; waits
  PODRING_KV_CHECK = 3,        // keys; number: 1 if all exist
  PODRING_KV_ADD = 4,          // a key, number; number: the sum
  PODRING_KV_COMPARE_SET = 5,  // a key, expected and desired value; gives what is stored
  PODRING_KV_APPEND = 6,       // a key, a value
  PODRING_KV_DELETE = 7,       // a key; number: 1 if it existed
  PODRING_KV_MULTI_GET = 8,    // keys; gives each value; waits
  PODRING_KV_MULTI_SET = 9,    // keys, as many values
  PODRING_KV_QUEUE_PUSH = 10,  // a key, a value
  PODRING_KV_QUEUE_POP = 11,   // a key, number: 0 not to wait (PODRING_QUEUE_EMPTY); gives the value
  PODRING_KV_QUEUE_LEN = 12,   // a key; number
  PODRING_KV_NUM_KEYS = 13,    // number
  PODRING_KV_LIST_KEYS = 14,   // gives each key
};

typedef struct PodringKvCall {
  uint32_t op;
  uint32_t n_keys;
  uint32_t n_values;
  const PodringBytes* keys;
  const PodringBytes* values;
  int64_t number;
  int64_t timeout_ms;   // what waits: <= 0 for ever
  int64_t patience_ms;  // for the coordinator's answer, beyond that; held to 1 to 30 s
  PodringInterrupted interrupted;
  void* interrupted_ctx;
  void (*sink)(void* ctx, const uint8_t* data, size_t len);  // called before kv_call returns
  void* sink_ctx;
} PodringKvCall;

typedef struct PodringKvInfo {
  uint64_t instance;  // names the life of the store
  uint32_t port;
  uint32_t serves;    // 1: the coordinator is this process's, and ends with the last client that opened it or a clone
} PodringKvInfo;

typedef struct PodringCore {
  uint32_t abi;   // PODRING_ABI
  uint32_t size;  // sizeof(PodringCore) of the core
  const char* version;

  void (*error_free)(PodringError* error);

  // Forms a group: returns when every member is known, or with an error that names the missing ranks.
  int32_t (*group_create)(const PodringGroupConfig* config, PodringGroup** group, PodringError* error);
  // Fails everything pending and to come with PODRING_ABORTED and `why`; tells the other members. Does not block.
  void (*group_abort)(PodringGroup* group, const char* why);
  // Orderly end of this rank's part: waits (bounded) for what is pending, then closes. The group may not be used after.
  void (*group_shutdown)(PodringGroup* group);
  // Gives up the handle. Works outlive it.
  void (*group_free)(PodringGroup* group);
  // PODRING_OK, or why the group is broken.
  int32_t (*group_error)(PodringGroup* group, PodringError* error);
  void (*group_set_timeout)(PodringGroup* group, int64_t timeout_ms);
  int64_t (*group_timeout)(PodringGroup* group);
  // Number of collectives posted so far.
  uint64_t (*group_sequence)(PodringGroup* group);
  // torch's monitored_barrier: rank 0 (or every rank) gets PODRING_TIMEOUT naming the first (wait_all: every) missing
  // rank. Does not break the group.
  int32_t (*group_monitored_barrier)(PodringGroup* group, int64_t timeout_ms, int32_t wait_all,
                                     PodringInterrupted interrupted, void* interrupted_ctx, PodringError* error);

  // Starts an operation and returns without waiting for anybody. The core reads and writes the tensors' memory until it
  // calls drop(keep), exactly once, on any thread, never while holding a lock of its own; also when post itself fails.
  int32_t (*post)(PodringGroup* group, const PodringCollective* collective, void* keep, void (*drop)(void* keep),
                  PodringWork** work, PodringError* error);

  // Drives the operation to its end on the calling thread. timeout_ms < 0: until the operation's own deadline; else
  // PODRING_TIMEOUT after that long, the operation staying under way.
  int32_t (*work_wait)(PodringWork* work, int64_t timeout_ms, PodringInterrupted interrupted, void* interrupted_ctx,
                       PodringError* error);
  // 0 under way, 1 done, 2 failed.
  int32_t (*work_state)(PodringWork* work);
  // PODRING_OK unless failed.
  int32_t (*work_error)(PodringWork* work, PodringError* error);
  uint64_t (*work_sequence)(PodringWork* work);
  // A number no other work of this process has or will have.
  uint64_t (*work_key)(PodringWork* work);
  int64_t (*work_timeout)(PodringWork* work);
  // recv: the sender's rank within the group, -1 while unknown or for other operations.
  int32_t (*work_source)(PodringWork* work);
  // Calls fn(ctx) exactly once when the work is done or failed: at once on this thread if it is already, else on a thread
  // of the callback pool, which grows rather than queue behind a callback that waits.
  void (*work_on_done)(PodringWork* work, void (*fn)(void* ctx), void* ctx);
  // Fails this work, and with it the group, with PODRING_ABORTED.
  void (*work_abort)(PodringWork* work);
  void (*work_free)(PodringWork* work);

  // Before the interpreter ends: waits until no callback runs or is queued (bounded by timeout_ms), then starts no more.
  // 0 if drained.
  int32_t (*drain)(int64_t timeout_ms);

  // Calls each(ctx, name, bytes) once per kind of memory that the process holds for all its groups at the moment.
  void (*group_memory)(PodringGroup* group, void (*each)(void* ctx, const char* name, uint64_t bytes), void* ctx);

  // Connects. Errors: PODRING_NETWORK (nobody there, something else there, lost), PODRING_STORE (refused, out of time),
  // PODRING_INVALID.
  int32_t (*kv_open)(const PodringKvConfig* config, PodringKv** kv, PodringError* error);
  // Another handle on the same connections.
  PodringKv* (*kv_clone)(const PodringKv* kv);
  void (*kv_free)(PodringKv* kv);
  void (*kv_info)(const PodringKv* kv, PodringKvInfo* info);
  int32_t (*kv_call)(const PodringKv* kv, const PodringKvCall* call, int64_t* number, PodringError* error);

  // Virtual chips, whose memory is this process's. The PJRT_Client that a framework created through podring's PJRT
  // plugin, null if there is none or its chips are real.
  void* (*device_client)(void);
  // Where the elements of a PJRT_Buffer of that client lie, once it has its value. PODRING_UNSUPPORTED if they are not
  // dense in row-major order.
  int32_t (*device_memory)(void* buffer, PodringMemory* memory, PodringError* error);
  // Makes 64-byte aligned memory a PJRT_Buffer of the chip, with no copy. The memory stays as it is until
  // release(memory, ctx), called exactly once, on any thread; also when this fails.
  int32_t (*device_adopt)(void* memory, const int64_t* sizes, uint64_t dims, uint8_t dtype,
                          void (*release)(void* memory, void* ctx), void* ctx, void** buffer, PodringError* error);
  // The group of all ranks, for collectives inside of programs that run on virtual chips; null: no longer. The group's
  // handle may be freed while it is lent.
  void (*device_world)(PodringGroup* group);
  // Compiles the programs of calls to come, on every member. *ready: of how many calls; 0 where the group's collectives
  // are no programs.
  int32_t (*group_warm_up)(PodringGroup* group, const PodringSized* calls, uint64_t n_calls, uint64_t* ready,
                           PodringError* error);
} PodringCore;

#ifdef __cplusplus
}
#endif
