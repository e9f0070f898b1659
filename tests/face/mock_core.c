// A core for tests of the face alone: it moves no data, writes down what it is asked, and ends operations when told.
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../../pg/torch/podring.h"

struct PodringGroup {
  int64_t timeout_ms;
  uint64_t sequence;
  int32_t error;
  PodringStore store;
};

typedef struct Callback {
  void (*fn)(void*);
  void* ctx;
  struct Callback* next;
} Callback;

struct PodringWork {
  int references;  // the caller's and the operation's own
  int32_t status;
  int under_way;
  uint64_t sequence;
  uint64_t key;
  int32_t source;
  int64_t timeout_ms;
  void* keep;
  void (*drop)(void*);
  Callback* callbacks;
  struct PodringWork* next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static char record[1 << 20];
static size_t recorded;
static int pending_mode;
static int32_t fail_post;
static int32_t fail_create;
static uint64_t keys;
static int alive_works, alive_groups, alive_stores;
static PodringWork* under_way;

static int silent;

static void note(const char* format, ...) {
  if (silent) return;
  va_list args;
  va_start(args, format);
  recorded += (size_t)vsnprintf(record + recorded, sizeof record - recorded, format, args);
  va_end(args);
}

// What tests steer it with.
const char* mock_record(void) { return record; }
void mock_clear(void) { record[recorded = 0] = 0; }
void mock_silent(int on) { silent = on; }
void mock_pending(int on) { pending_mode = on; }
void mock_fail_post(int32_t status) { fail_post = status; }
void mock_fail_create(int32_t status) { fail_create = status; }
void mock_alive(int* works, int* groups, int* stores) {
  *works = alive_works, *groups = alive_groups, *stores = alive_stores;
}

static int32_t fail(PodringError* error, int32_t status) {
  error->status = status;
  error->message = strdup("the mock was told to fail");
  return status;
}
static void error_free(PodringError* error) {
  free(error->message);
  error->message = NULL;
}

static void release(PodringWork* work) {
  pthread_mutex_lock(&lock);
  const int last = --work->references == 0;
  alive_works -= last;
  pthread_mutex_unlock(&lock);
  if (last) free(work);
}

static void end(PodringWork* work, int32_t status) {
  pthread_mutex_lock(&lock);
  work->status = status;
  work->under_way = 0;
  Callback* callback = work->callbacks;
  work->callbacks = NULL;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
  work->drop(work->keep);
  while (callback != NULL) {
    Callback* next = callback->next;
    callback->fn(callback->ctx);
    free(callback);
    callback = next;
  }
  release(work);
}

static void* end_all(void* status) {
  pthread_mutex_lock(&lock);
  PodringWork* work = under_way;
  under_way = NULL;
  pthread_mutex_unlock(&lock);
  while (work != NULL) {
    PodringWork* next = work->next;
    end(work, (int32_t)(intptr_t)status);
    work = next;
  }
  return NULL;
}
static void* end_all_later(void* ms) {
  const int64_t left = (int64_t)(intptr_t)ms;
  const struct timespec pause = {left / 1000, left % 1000 * 1000000};
  nanosleep(&pause, NULL);
  return end_all(NULL);
}
// Ends everything pending, on a thread of its own as the core's pool would.
void mock_end(int32_t status) {
  pthread_t thread;
  pthread_create(&thread, NULL, end_all, (void*)(intptr_t)status);
  pthread_join(thread, NULL);
}
void mock_end_later(int64_t ms) {
  pthread_t thread;
  pthread_create(&thread, NULL, end_all_later, (void*)(intptr_t)ms);
  pthread_detach(thread);
}

static void note_value(void* into, const uint8_t* value, size_t len) { note("%s=%.*s;", (char*)into, (int)len, value); }

static int32_t group_create(const PodringGroupConfig* config, PodringGroup** out, PodringError* error) {
  note("group %s rank %u of %u timeout %lld members", config->name, config->rank, config->size,
       (long long)config->timeout_ms);
  for (uint32_t i = 0; config->global_ranks != NULL && i < config->size; ++i) note(" %u", config->global_ranks[i]);
  note("\n");
  char why[256] = "";
  const char* names[] = {"a", "missing"};
  int32_t present = -1, absent = -1;
  int64_t sum = 0;
  const PodringStore* store = &config->store;
  const int ok = store->set(store->ctx, "a", (const uint8_t*)"x", 1, why, sizeof why) == 0 &&
                 store->get(store->ctx, "a", note_value, (void*)"a", why, sizeof why) == 0 &&
                 store->check(store->ctx, names, 1, &present, why, sizeof why) == 0 &&
                 store->check(store->ctx, names, 2, &absent, why, sizeof why) == 0 &&
                 store->add(store->ctx, "n", 5, &sum, why, sizeof why) == 0;
  note("store %s %d %d %lld %s\n", ok ? "ok" : "failed", present, absent, (long long)sum, why);
  if (fail_create != 0) {
    store->release(store->ctx);
    return fail(error, fail_create);
  }
  PodringGroup* group = calloc(1, sizeof *group);
  group->timeout_ms = config->timeout_ms;
  group->store = *store;
  pthread_mutex_lock(&lock);
  ++alive_groups;
  ++alive_stores;
  pthread_mutex_unlock(&lock);
  *out = group;
  return PODRING_OK;
}
static void group_abort(PodringGroup* group, const char* why) {
  group->error = PODRING_ABORTED;
  note("abort %s\n", why);
  end_all((void*)(intptr_t)PODRING_ABORTED);
}
static void group_shutdown(PodringGroup* group) {
  note("shutdown\n");
  group->store.release(group->store.ctx);
  group->store.ctx = NULL;
  pthread_mutex_lock(&lock);
  --alive_stores;
  pthread_mutex_unlock(&lock);
}
static void group_free(PodringGroup* group) {
  if (group->store.ctx != NULL) group_shutdown(group);
  pthread_mutex_lock(&lock);
  --alive_groups;
  pthread_mutex_unlock(&lock);
  free(group);
}
static int32_t group_error(PodringGroup* group, PodringError* error) {
  return group->error == 0 ? PODRING_OK : fail(error, group->error);
}
static void group_set_timeout(PodringGroup* group, int64_t timeout_ms) { group->timeout_ms = timeout_ms; }
static int64_t group_timeout(PodringGroup* group) { return group->timeout_ms; }
static uint64_t group_sequence(PodringGroup* group) { return group->sequence; }
static int32_t group_monitored_barrier(PodringGroup* group, int64_t timeout_ms, int32_t wait_all, PodringInterrupted asked,
                                       void* ctx, PodringError* error) {
  (void)group, (void)asked, (void)ctx;
  note("monitored_barrier %lld %d\n", (long long)timeout_ms, wait_all);
  return timeout_ms == 0 ? fail(error, PODRING_TIMEOUT) : PODRING_OK;
}

static void note_side(const char* name, const PodringSide* side) {
  note(" %s", name);
  for (uint64_t i = 0; i < side->n_tensors; ++i) {
    const PodringTensor* tensor = &side->tensors[i];
    note("%s", i == 0 ? " " : ",");
    for (uint32_t d = 0; d < tensor->dims; ++d) {
      note("%s%lld/%lld", d == 0 ? "[" : " ", (long long)tensor->sizes[d], (long long)tensor->strides[d]);
    }
    note("%s%s", tensor->dims == 0 ? "[]" : "]", tensor->data == NULL ? "null" : "");
    if (tensor->flags != 0) note("flags%u", tensor->flags);
  }
  for (uint64_t i = 0; i < side->n_counts; ++i) note("%s%llu", i == 0 ? " cut " : "+", (unsigned long long)side->counts[i]);
}

static int32_t post(PodringGroup* group, const PodringCollective* collective, void* keep, void (*drop)(void*),
                    PodringWork** out, PodringError* error) {
  pthread_mutex_lock(&lock);
  note("post %u root %d tag %u timeout %lld flags %u", collective->kind, collective->root, collective->tag,
       (long long)collective->timeout_ms, collective->flags);
  for (uint32_t i = 0; i < collective->n_parts; ++i) {
    const PodringPart* part = &collective->parts[i];
    note(" | dtype %u red %u factor %g", part->dtype, part->reduction, part->factor);
    note_side("in", &part->inputs);
    note_side("out", &part->outputs);
  }
  note("\n");
  pthread_mutex_unlock(&lock);
  if (fail_post != 0) {
    drop(keep);
    return fail(error, fail_post);
  }
  PodringWork* work = calloc(1, sizeof *work);
  pthread_mutex_lock(&lock);
  ++alive_works;
  work->references = 2;
  work->under_way = 1;
  work->sequence = group->sequence++;
  work->key = ++keys;
  work->source = collective->kind == PODRING_RECV ? 0 : -1;
  work->timeout_ms = collective->timeout_ms > 0 ? collective->timeout_ms : group->timeout_ms;
  work->keep = keep;
  work->drop = drop;
  if (pending_mode) {
    work->next = under_way;
    under_way = work;
  }
  pthread_mutex_unlock(&lock);
  *out = work;
  if (!pending_mode) end(work, PODRING_OK);
  return PODRING_OK;
}

static int32_t work_wait(PodringWork* work, int64_t timeout_ms, PodringInterrupted asked, void* ctx, PodringError* error) {
  int64_t waited = 0;
  pthread_mutex_lock(&lock);
  while (work->under_way) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 50 * 1000000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    if (pthread_cond_timedwait(&changed, &lock, &until) != ETIMEDOUT) continue;
    waited += 50;
    pthread_mutex_unlock(&lock);
    if (asked != NULL && asked(ctx) != 0) return fail(error, PODRING_INTERRUPTED);
    if (timeout_ms >= 0 && waited >= timeout_ms) return fail(error, PODRING_TIMEOUT);
    pthread_mutex_lock(&lock);
  }
  const int32_t status = work->status;
  pthread_mutex_unlock(&lock);
  return status == PODRING_OK ? PODRING_OK : fail(error, status);
}
static int32_t work_state(PodringWork* work) {
  pthread_mutex_lock(&lock);
  const int32_t state = work->under_way ? 0 : work->status == PODRING_OK ? 1 : 2;
  pthread_mutex_unlock(&lock);
  return state;
}
static int32_t work_error(PodringWork* work, PodringError* error) {
  return work->status == PODRING_OK ? PODRING_OK : fail(error, work->status);
}
static uint64_t work_sequence(PodringWork* work) { return work->sequence; }
static uint64_t work_key(PodringWork* work) { return work->key; }
static int64_t work_timeout(PodringWork* work) { return work->timeout_ms; }
static int32_t work_source(PodringWork* work) { return work->source; }
static void work_on_done(PodringWork* work, void (*fn)(void*), void* ctx) {
  pthread_mutex_lock(&lock);
  const int now = !work->under_way;
  if (!now) {
    Callback* callback = malloc(sizeof *callback);
    *callback = (Callback){fn, ctx, work->callbacks};
    work->callbacks = callback;
  }
  pthread_mutex_unlock(&lock);
  if (now) fn(ctx);
}
static void work_abort(PodringWork* work) {
  (void)work;
  end_all((void*)(intptr_t)PODRING_ABORTED);
}
static int32_t drain(int64_t timeout_ms) {
  note("drain %lld\n", (long long)timeout_ms);
  return 0;
}
static void group_memory(PodringGroup* group, void (*each)(void*, const char*, uint64_t), void* ctx) {
  (void)group;
  each(ctx, "shared", 4096);
  each(ctx, "private", 17);
}

PodringCore mock_core = {
    .abi = PODRING_ABI,
    .size = sizeof(PodringCore),
    .version = "mock",
    .error_free = error_free,
    .group_create = group_create,
    .group_abort = group_abort,
    .group_shutdown = group_shutdown,
    .group_free = group_free,
    .group_error = group_error,
    .group_set_timeout = group_set_timeout,
    .group_timeout = group_timeout,
    .group_sequence = group_sequence,
    .group_monitored_barrier = group_monitored_barrier,
    .post = post,
    .work_wait = work_wait,
    .work_state = work_state,
    .work_error = work_error,
    .work_sequence = work_sequence,
    .work_key = work_key,
    .work_timeout = work_timeout,
    .work_source = work_source,
    .work_on_done = work_on_done,
    .work_abort = work_abort,
    .work_free = release,
    .drain = drain,
    .group_memory = group_memory,
};
