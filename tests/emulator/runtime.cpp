// Runs the blocks of a grid one after the other, the threads of a block as fibers that meet at
// barriers, and checks every access that the kernel makes.
//
// The kernel is compiled with -fsanitize=thread for the calls that g++ then places before each
// access; this file is what answers them. It is compiled without, so it does not observe itself.
#include "runtime.h"

#include <ucontext.h>

#include <cstdio>
#include <vector>

namespace {

constexpr size_t SHARED = 256 << 10;
constexpr size_t STACK = 64 << 10;
constexpr uint16_t NOBODY = 0xffff;
constexpr uint16_t SEVERAL = 0xfffe;

enum class State { READY, WAITING, DONE };

struct Fiber {
  ucontext_t context;
  State state;
  const void* site;
  Index index;
};

// Who touched a byte of shared memory. Of the phases between two barriers only the last counts.
struct Shadow {
  uint32_t write_phase = 0, read_phase = 0;
  uint16_t writer = NOBODY, reader = NOBODY;
};

struct Range {
  uintptr_t begin, end;
};

std::vector<Fiber> fibers;
std::vector<char> stacks;
std::vector<Shadow> shadow(SHARED);
std::vector<Range> tensors;
bool unknown_allowed;
size_t shared_bytes;
uint32_t phase;
ucontext_t scheduler;
size_t running;
Index block_index;
void (*entry)(void**);
void** entry_arguments;
char message[256];

void to_scheduler() { swapcontext(&fibers[running].context, &scheduler); }

[[noreturn]] void fail() {
  // The whole launch ends: the scheduler sees the message and never comes back here.
  for (;;) to_scheduler();
}

#define FAIL(...)                                  \
  do {                                             \
    snprintf(message, sizeof message, __VA_ARGS__); \
    fail();                                        \
  } while (0)

void start() {
  entry(entry_arguments);
  fibers[running].state = State::DONE;
  for (;;) to_scheduler();
}

void check_shared(size_t offset, size_t size, bool write) {
  if (offset + size > shared_bytes)
    FAIL("thread %zu %s shared byte %zu of %zu", running, write ? "writes" : "reads",
         offset + size - 1, shared_bytes);
  for (size_t i = offset; i < offset + size; ++i) {
    Shadow& s = shadow[i];
    if (!write && s.writer == NOBODY)
      FAIL("thread %zu reads shared byte %zu, which nobody has written", running, i);
    bool other_wrote = s.write_phase == phase && s.writer != NOBODY && s.writer != running;
    if (other_wrote)
      FAIL("race: thread %zu %s shared byte %zu, which thread %u wrote since the last barrier",
           running, write ? "writes" : "reads", i, s.writer);
    bool other_read = s.read_phase == phase && s.reader != NOBODY && s.reader != running;
    if (write && other_read)
      FAIL("race: thread %zu writes shared byte %zu, which another read since the last barrier",
           running, i);
    if (write) {
      s.write_phase = phase;
      s.writer = running;
    } else {
      bool again = s.read_phase == phase && s.reader != running;
      s.reader = again ? SEVERAL : running;
      s.read_phase = phase;
    }
  }
}

void check(const void* pointer, size_t size, bool write) {
  uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  uintptr_t shared = reinterpret_cast<uintptr_t>(buf_dyn_shmem_ptr);
  if (address - shared < SHARED) return check_shared(address - shared, size, write);
  uintptr_t stack = reinterpret_cast<uintptr_t>(stacks.data());
  if (unknown_allowed || address - stack < stacks.size()) return;
  for (const Range& t : tensors)
    if (address >= t.begin && address + size <= t.end) return;
  FAIL("thread %zu of block %u %s %zu bytes outside of every tensor", running, block_index.x,
       write ? "writes" : "reads", size);
}

// Returns whether a block ran to its end.
bool run_block(size_t threads) {
  phase = 1;
  std::fill(shadow.begin(), shadow.begin() + shared_bytes, Shadow{});
  // What is read before it is written is NaN besides being reported.
  memset(buf_dyn_shmem_ptr, 0xff, shared_bytes);
  for (size_t i = 0; i < threads; ++i) {
    Fiber& f = fibers[i];
    f.state = State::READY;
    f.index = {static_cast<unsigned>(i), 0, 0};
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = stacks.data() + i * STACK;
    f.context.uc_stack.ss_size = STACK;
    f.context.uc_link = nullptr;
    makecontext(&f.context, start, 0);
  }
  for (;;) {
    size_t done = 0;
    for (running = 0; running < threads; ++running) {
      if (fibers[running].state == State::READY) swapcontext(&scheduler, &fibers[running].context);
      if (message[0]) return false;
      done += fibers[running].state == State::DONE;
    }
    if (done == threads) return true;
    for (size_t i = 0; i < threads; ++i) {
      if (fibers[i].state != State::WAITING || fibers[i].site != fibers[0].site) {
        snprintf(message, sizeof message, "threads 0 and %zu do not meet at one barrier", i);
        return false;
      }
      fibers[i].state = State::READY;
    }
    ++phase;
  }
}

}  // namespace

alignas(128) unsigned char buf_dyn_shmem_ptr[SHARED];

namespace emulator {
Index thread() { return fibers[running].index; }
Index block() { return block_index; }
void barrier(const void* site) {
  fibers[running].state = State::WAITING;
  fibers[running].site = site;
  to_scheduler();
}
}  // namespace emulator

extern "C" {

// Returns null, or what went wrong. Ranges are begin and end of the tensors, in turn.
const char* emulator_launch(void (*kernel)(void**), void** arguments, size_t blocks, size_t threads,
                            size_t dynamic, const uintptr_t* ranges, size_t count, int unknown) {
  entry = kernel;
  entry_arguments = arguments;
  message[0] = 0;
  shared_bytes = dynamic;
  unknown_allowed = unknown != 0;
  if (dynamic > SHARED) return "more shared memory than any GPU has";
  tensors.clear();
  for (size_t i = 0; i < count; ++i) tensors.push_back({ranges[2 * i], ranges[2 * i + 1]});
  fibers.resize(threads);
  stacks.resize(threads * STACK);
  for (size_t b = 0; b < blocks; ++b) {
    block_index = {static_cast<unsigned>(b), 0, 0};
    if (!run_block(threads)) return message;
  }
  return nullptr;
}

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
#define ACCESS(size)                                                            \
  void __tsan_read##size(void* p) { check(p, size, false); }                    \
  void __tsan_write##size(void* p) { check(p, size, true); }                    \
  void __tsan_unaligned_read##size(void* p) { check(p, size, false); }          \
  void __tsan_unaligned_write##size(void* p) { check(p, size, true); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
void __tsan_read_range(void* p, size_t size) { check(p, size, false); }
void __tsan_write_range(void* p, size_t size) { check(p, size, true); }
}
