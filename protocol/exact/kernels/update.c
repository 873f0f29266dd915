/* The exact update. Its definition is `_RULES` in protocol/exact/update.py: each line here is the
   same float32 operations in the same order. Multiplying by a clip or decay factor of 1 changes no
   value, so it needs no case; adding a product with a decay of 0 would change zeros, so it does. */

#include "hash.h"

typedef struct {
  float learning_rate, clip, weight_decay, decay_factor, momentum, beta1, one_minus_beta1, beta2,
      one_minus_beta2, step_size, root_correction, epsilon, averaging, one_minus_averaging, drift;
} Scalars;
enum { SGD, MOMENTUM, NESTEROV, ADAMW, LION, SCHEDULE_FREE, ADAM, RMSPROP, ADAGRAD };
typedef struct {
  f32 *p; const f32 *g; f32 *m, *v; const Scalars *scalars; u32 rule, not_finite;
} Update;

#define EACH for (usize i = lo; i < hi; i++)
#define STATE                                                                            \
  f32 *restrict const p = u->p; const f32 *restrict const g = u->g;                      \
  f32 *restrict const m = u->m; f32 *restrict const v = u->v; const Scalars c = *u->scalars; \
  u32 bad_p = 0, bad_m = 0, bad_v = 0; (void)m; (void)v
#define FOUND \
  __atomic_fetch_or(&u->not_finite, (bad_p != 0) | (bad_m != 0) << 1 | (bad_v != 0) << 2, \
                    __ATOMIC_RELAXED)
#define PUT(array, value)                                  \
  do {                                                     \
    const float put_ = (value);                            \
    array[i] = put_;                                       \
    bad_##array |= not_finite(put_);                       \
  } while (0)

INLINE float with_decay(Scalars c, float g, float p, int decay) {
  const float clipped = g * c.clip;
  return decay ? clipped + p * c.weight_decay : clipped;
}

INLINE float second_moment(Scalars c, float v, float direction) {
  return v * c.beta2 + (direction * c.one_minus_beta2) * direction;
}

INLINE float root(Scalars c, float v) {
  return __builtin_sqrtf(v) * c.root_correction + c.epsilon;
}

INLINE float sign(float x) { return x > 0 ? 1.0f : x < 0 ? -1.0f : x == 0 ? 0.0f : x; }

INLINE void sgd(Update *u, usize lo, usize hi, int decay) {
  STATE;
  EACH {
    const float direction = with_decay(c, g[i], p[i], decay);
    PUT(p, p[i] - direction * c.learning_rate);
  }
  FOUND;
}

INLINE void momentum(Update *u, usize lo, usize hi, int decay, int nesterov) {
  STATE;
  EACH {
    const float direction = with_decay(c, g[i], p[i], decay);
    const float velocity = m[i] * c.momentum + direction;
    PUT(m, velocity);
    const float step = nesterov ? direction + velocity * c.momentum : velocity;
    PUT(p, p[i] - step * c.learning_rate);
  }
  FOUND;
}

/* adamw decays parameters, adam adds their decay to the gradient. */
INLINE void adam(Update *u, usize lo, usize hi, int from_moment, int coupled, int decay) {
  STATE;
  EACH {
    const float direction = coupled ? with_decay(c, g[i], p[i], decay) : g[i] * c.clip;
    const float apart = direction - m[i], start = coupled ? p[i] : p[i] * c.decay_factor;
    const float first =
        from_moment ? m[i] + apart * c.one_minus_beta1 : direction - apart * c.beta1;
    const float second = second_moment(c, v[i], direction);
    PUT(m, first);
    PUT(v, second);
    PUT(p, start - first / root(c, second) * c.step_size);
  }
  FOUND;
}

/* Here m is the only moment, that of squares. */
INLINE void by_root(Update *u, usize lo, usize hi, int decay, int fading) {
  STATE;
  EACH {
    const float direction = with_decay(c, g[i], p[i], decay);
    const float second =
        fading ? second_moment(c, m[i], direction) : m[i] + direction * direction;
    PUT(m, second);
    PUT(p, p[i] - direction / (__builtin_sqrtf(second) + c.epsilon) * c.learning_rate);
  }
  FOUND;
}

INLINE void lion(Update *u, usize lo, usize hi) {
  STATE;
  EACH {
    const float direction = g[i] * c.clip;
    const float mixed = direction * c.one_minus_beta1 + m[i] * c.beta1;
    PUT(p, p[i] * c.decay_factor - (sign(mixed) * c.learning_rate + 0.0f));
    PUT(m, m[i] * c.beta2 + direction * c.one_minus_beta2);
  }
  FOUND;
}

INLINE void schedule_free(Update *u, usize lo, usize hi, int decay) {
  STATE;
  EACH {
    const float direction = g[i] * c.clip;
    const float second = second_moment(c, v[i], direction);
    PUT(v, second);
    const float scaled = direction / root(c, second);
    const float step = decay ? scaled + p[i] * c.weight_decay : scaled;
    PUT(p, (p[i] + m[i] * c.averaging) - step * c.step_size);
    PUT(m, (m[i] - step * c.drift) * c.one_minus_averaging);
  }
  FOUND;
}

static void update_range(void *call, usize lo, usize hi) {
  Update *u = call;
  const int decay = u->scalars->weight_decay != 0;
  const int from_moment = u->scalars->one_minus_beta1 < 0.5f;
  switch (u->rule) {
    case SGD: if (decay) sgd(u, lo, hi, 1); else sgd(u, lo, hi, 0); break;
    case MOMENTUM: if (decay) momentum(u, lo, hi, 1, 0); else momentum(u, lo, hi, 0, 0); break;
    case NESTEROV: if (decay) momentum(u, lo, hi, 1, 1); else momentum(u, lo, hi, 0, 1); break;
    case ADAMW:
      if (from_moment) adam(u, lo, hi, 1, 0, 0); else adam(u, lo, hi, 0, 0, 0);
      break;
    case ADAM:
      if (from_moment) { if (decay) adam(u, lo, hi, 1, 1, 1); else adam(u, lo, hi, 1, 1, 0); }
      else { if (decay) adam(u, lo, hi, 0, 1, 1); else adam(u, lo, hi, 0, 1, 0); }
      break;
    case RMSPROP: if (decay) by_root(u, lo, hi, 1, 1); else by_root(u, lo, hi, 0, 1); break;
    case ADAGRAD: if (decay) by_root(u, lo, hi, 1, 0); else by_root(u, lo, hi, 0, 0); break;
    case LION: lion(u, lo, hi); break;
    case SCHEDULE_FREE:
      if (decay) schedule_free(u, lo, hi, 1); else schedule_free(u, lo, hi, 0);
      break;
  }
}

#define STATES 3 /* arrays that an update changes: p, m and v, some of which a rule lacks */
#define PIECE (PIECE_BYTES / sizeof(f32))
#define CACHED 1024 /* values of each array that are hashed while the cache still has them */
typedef struct { Update update; u8 *hashes; usize count; } HashedUpdate;

/* `lo` begins a piece. */
static void hashed_update_range(void *call, usize lo, usize hi) {
  HashedUpdate *h = call;
  Update *u = &h->update;
  const u8 *states[STATES] = {(const u8 *)u->p, (const u8 *)u->m, (const u8 *)u->v};
  const usize pieces = (h->count + PIECE - 1) / PIECE;
  for (usize from = lo; from < hi; from += PIECE) {
    const usize to = hi - from < PIECE ? hi : from + PIECE, bytes = (to - from) * sizeof(f32);
    Hash hashes[STATES];
    for (int n = 0; n < STATES; n++) begin_hash(hashes + n);
    for (usize at = from; at < to; at += CACHED) {
      const usize end = to - at < CACHED ? to : at + CACHED;
      update_range(u, at, end);
      for (int n = 0; n < STATES; n++)
        if (states[n])
          hash_blocks(hashes + n, states[n] + from * sizeof(f32), (end - from) * sizeof(f32), bytes);
    }
    if (bytes < SHORTEST_HASHED) return;
    for (int n = 0; n < STATES; n++)
      if (states[n])
        end_hash(hashes + n, states[n] + from * sizeof(f32), bytes,
                 h->hashes + (n * pieces + from / PIECE) * 16);
  }
}

/* Take one step in place, and hash the new values like `piece_hashes`: `hashes` has 16 bytes for
   each piece of p, then of m, then of v; null if not wanted. Returns 0 if all new values are
   finite; else bit 0 if a parameter is not, bits 1 and 2 likewise for the moments. */
u32 apply_update(u32 rule, const Scalars *scalars, f32 *p, const f32 *g, f32 *m, f32 *v,
                 u8 *hashes, usize count, u32 threads) {
  HashedUpdate call = {{p, g, m, v, scalars, rule, 0}, hashes, count};
  if (hashes) in_parallel(hashed_update_range, &call, count, PIECE, threads);
  else in_parallel(update_range, &call.update, count, 4096, threads);
  return call.update.not_finite;
}
