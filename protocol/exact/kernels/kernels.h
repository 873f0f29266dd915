/* What all kernels share: types, bits of a float32, and threads.

   No header or library of the system is used. Pointers may have any alignment. Operations
   are executed in the order in which they are written: the build forbids contraction and
   reordering. */

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16 __attribute__((aligned(1)));
typedef int i32;
typedef unsigned int u32;
typedef unsigned long usize;
typedef float f32 __attribute__((aligned(1)));
typedef double f64;

#define INLINE static inline __attribute__((always_inline))
#define EXPONENT 0x7f800000u
#define MAGNITUDE 0x7fffffffu
#define UPPER_HALF 0xffff0000u

INLINE u32 bits_of(float value) { u32 bits; __builtin_memcpy(&bits, &value, 4); return bits; }
INLINE float float_of(u32 bits) { float value; __builtin_memcpy(&value, &bits, 4); return value; }
INLINE u32 not_finite(float value) { return (bits_of(value) & EXPONENT) == EXPONENT; }

/* Round to bfloat16: nearest, ties to even; NaN becomes the quiet NaN. */
INLINE u32 round_bits(u32 bits) {
  const u32 nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) & UPPER_HALF;
  return (bits & MAGNITUDE) > EXPONENT ? 0x7fc00000u : nearest;
}

/* Threads live for one call. Each takes one contiguous range that begins at a multiple of `grain`,
   so the ranges, and the order within each, do not depend on timing. */
typedef void (*Range)(void *call, usize lo, usize hi);
typedef struct { Range run; void *call; usize lo, hi; unsigned long thread; int started; } Part;
int pthread_create(unsigned long *, const void *, void *(*)(void *), void *);
int pthread_join(unsigned long, void **);
#define MAX_THREADS 64

static void *run_part(void *argument) {
  Part *part = argument;
  part->run(part->call, part->lo, part->hi);
  return 0;
}

static __attribute__((unused)) void
in_parallel(Range run, void *call, usize count, usize grain, u32 threads) {
  const usize grains = (count + grain - 1) / grain;
  if (threads > MAX_THREADS) threads = MAX_THREADS;
  if (threads > grains) threads = (u32)grains;
  if (threads < 2) { run(call, 0, count); return; }
  Part parts[MAX_THREADS];
  for (u32 t = 0; t < threads; t++) {
    const usize lo = grains * t / threads * grain, hi = grains * (t + 1) / threads * grain;
    parts[t] = (Part){run, call, lo, hi < count ? hi : count, 0, 0};
    if (t) parts[t].started = !pthread_create(&parts[t].thread, 0, run_part, parts + t);
  }
  run_part(parts);
  for (u32 t = 1; t < threads; t++) {
    if (parts[t].started) pthread_join(parts[t].thread, 0);
    else run_part(parts + t);
  }
}
