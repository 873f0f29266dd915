"""Run a list of kernels with several threads: C, called once per thread for the whole list.

Each kernel is divided into pieces of workgroups. A thread claims the next unclaimed piece, and no
thread starts a kernel before the previous one is complete. The assignment of pieces to threads
does not affect the bits. A thread sets the convention's subnormal mode and default rounding, and
restores its settings before it returns.
"""

from __future__ import annotations

from typing import Final

TEXT: Final = r"""
typedef void (*Kernel)(void *const *, const u32 *, usize, usize, u32, u32, u32);
typedef struct {
  Kernel run; void *const *buffers; const u32 *bytes; usize groups, piece;
  u32 groups_x, groups_y, groups_z, unused;
} Call;
int sched_yield(void);

#if defined(__x86_64__)
INLINE u32 settings(void) { return __builtin_ia32_stmxcsr(); }
INLINE void set(u32 to) { __builtin_ia32_ldmxcsr(to); }
#define PLAIN 0x1f80u
#define FLUSHING 0x9fc0u
#elif defined(__aarch64__)
INLINE u32 settings(void) { u64 x; __asm__ volatile("mrs %0, fpcr" : "=r"(x)); return (u32)x; }
INLINE void set(u32 to) { u64 x = to; __asm__ volatile("msr fpcr, %0" : : "r"(x)); }
#define PLAIN 0u
#define FLUSHING 0x1000000u
#endif

/* taken and done: a number for each call, zero at first. */
void run_calls(const Call *calls, usize count, u32 *taken, u32 *done, u32 threads, u32 flushes) {
  const u32 before = settings();
  set(flushes ? FLUSHING : PLAIN);
  for (usize c = 0; c < count; c++) {
    const Call *call = calls + c;
    if (threads == 1) {
      call->run(call->buffers, call->bytes, 0, call->groups, call->groups_x, call->groups_y,
                call->groups_z);
      continue;
    }
    const u32 pieces = (u32)((call->groups + call->piece - 1) / call->piece);
    for (;;) {
      const u32 mine = __atomic_fetch_add(taken + c, 1, __ATOMIC_RELAXED);
      if (mine >= pieces) break;
      const usize first = mine * call->piece;
      const usize last = first + call->piece < call->groups ? first + call->piece : call->groups;
      call->run(call->buffers, call->bytes, first, last, call->groups_x, call->groups_y,
                call->groups_z);
      __atomic_fetch_add(done + c, 1, __ATOMIC_RELEASE);
    }
    for (u32 turn = 0; __atomic_load_n(done + c, __ATOMIC_ACQUIRE) < pieces; turn++) {
      if (turn < 4000) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
      } else {
        sched_yield();
      }
    }
  }
  set(before);
}
"""
