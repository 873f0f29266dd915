/* The exact update. Its definition is `_RULES` in protocol/exact/update.py: each line here is the
   same float32 operations in the same order. Multiplying by a clip or decay factor of 1 changes no
   value, so it needs no case; adding a product with a decay of 0 would change zeros, so it does. */

#include "hash.h"

typedef struct {
  float learning_rate, clip, weight_decay, decay_factor, momentum, beta1, one_minus_beta1, beta2,
      one_minus_beta2, step_size, root_correction, epsilon, averaging, one_minus_averaging, drift,
      clip_value, average_keep;
} Scalars;
enum {
  SGD, MOMENTUM, NESTEROV, ADAMW, LION, SCHEDULE_FREE, ADAM, RMSPROP, ADAGRAD, ADAM_AMSGRAD,
  ADAMW_AMSGRAD, RMSPROP_MOMENTUM, RMSPROP_CENTERED, RMSPROP_CENTERED_MOMENTUM, ADAFACTOR
};
typedef struct {
  f32 *p; const f32 *g; f32 *m, *v, *w, *e; const Scalars *scalars; u32 rule, not_finite;
} Update;

#define EACH for (usize i = lo; i < hi; i++)
#define STATE                                                                            \
  f32 *restrict const p = u->p; const f32 *restrict const g = u->g;                      \
  f32 *restrict const m = u->m; f32 *restrict const v = u->v; f32 *restrict const w = u->w;  \
  const Scalars c = *u->scalars; u32 bad_p = 0, bad_m = 0, bad_v = 0, bad_w = 0;         \
  (void)m; (void)v; (void)w
#define FOUND \
  __atomic_fetch_or(&u->not_finite, (bad_p | bad_m | bad_v | bad_w) != 0, __ATOMIC_RELAXED)
#define PUT(array, value)                                  \
  do {                                                     \
    const float put_ = (value);                            \
    array[i] = put_;                                       \
    bad_##array |= not_finite(put_);                       \
  } while (0)

/* Without clipping by value its bound is infinite, which changes no value. */
INLINE float clip(Scalars c, float g) {
  const float scaled = g * c.clip;
  return scaled > c.clip_value ? c.clip_value : scaled < -c.clip_value ? -c.clip_value : scaled;
}

INLINE float with_decay(Scalars c, float g, float p, int decay) {
  const float clipped = clip(c, g);
  return decay ? clipped + p * c.weight_decay : clipped;
}

/* Interpolates from the nearer end; `near` says whether that is the moment. */
INLINE float moved(float moment, float direction, float share, float keep, int near) {
  const float apart = direction - moment;
  return near ? moment + apart * share : direction - apart * keep;
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
INLINE void adam(Update *u, usize lo, usize hi, int from_moment, int coupled, int decay,
                 int amsgrad) {
  STATE;
  EACH {
    const float direction = coupled ? with_decay(c, g[i], p[i], decay) : clip(c, g[i]);
    const float start = coupled ? p[i] : p[i] * c.decay_factor;
    const float first = moved(m[i], direction, c.one_minus_beta1, c.beta1, from_moment);
    const float second = second_moment(c, v[i], direction);
    PUT(m, first);
    PUT(v, second);
    const float largest = !amsgrad ? second : second > w[i] ? second : w[i];
    if (amsgrad) PUT(w, largest);
    PUT(p, start - first / root(c, largest) * c.step_size);
  }
  FOUND;
}

INLINE void adagrad(Update *u, usize lo, usize hi, int decay) {
  STATE;
  EACH {
    const float direction = with_decay(c, g[i], p[i], decay);
    const float second = m[i] + direction * direction;
    PUT(m, second);
    PUT(p, p[i] - direction / (__builtin_sqrtf(second) + c.epsilon) * c.learning_rate);
  }
  FOUND;
}

/* m has the squares; then come velocities, if there are any, and means. */
INLINE void rmsprop(Update *u, usize lo, usize hi, int near, int centered, int momentum,
                    int decay) {
  STATE;
  EACH {
    const float direction = with_decay(c, g[i], p[i], decay);
    const float second = second_moment(c, m[i], direction);
    PUT(m, second);
    float variance = second;
    if (centered) {
      const float before = momentum ? w[i] : v[i];
      const float mean = moved(before, direction, c.one_minus_beta2, c.beta2, near);
      if (momentum) PUT(w, mean); else PUT(v, mean);
      variance = second - mean * mean;
      variance = variance < 0 ? 0.0f : variance;
    }
    float step = direction / (__builtin_sqrtf(variance) + c.epsilon);
    if (momentum) {
      step = v[i] * c.momentum + step;
      PUT(v, step);
    }
    PUT(p, p[i] - step * c.learning_rate);
  }
  FOUND;
}

/* g is the direction that `apply_adafactor` has made of the gradient. */
INLINE void adafactor(Update *u, usize lo, usize hi) {
  STATE;
  EACH PUT(p, p[i] * c.decay_factor - g[i] * c.learning_rate);
  FOUND;
}

INLINE void lion(Update *u, usize lo, usize hi) {
  STATE;
  EACH {
    const float direction = clip(c, g[i]);
    const float mixed = direction * c.one_minus_beta1 + m[i] * c.beta1;
    PUT(p, p[i] * c.decay_factor - (sign(mixed) * c.learning_rate + 0.0f));
    PUT(m, m[i] * c.beta2 + direction * c.one_minus_beta2);
  }
  FOUND;
}

INLINE void schedule_free(Update *u, usize lo, usize hi, int decay) {
  STATE;
  EACH {
    const float direction = clip(c, g[i]);
    const float second = second_moment(c, v[i], direction);
    PUT(v, second);
    const float scaled = direction / root(c, second);
    const float step = decay ? scaled + p[i] * c.weight_decay : scaled;
    PUT(p, (p[i] + m[i] * c.averaging) - step * c.step_size);
    PUT(m, (m[i] - step * c.drift) * c.one_minus_averaging);
  }
  FOUND;
}

/* Each combination of constants is a loop of its own. */
#define COUPLED(near, decay, amsgrad) adam(u, lo, hi, near, 1, decay, amsgrad)
INLINE void coupled_adam(Update *u, usize lo, usize hi, int near, int decay, int amsgrad) {
  if (near) { if (decay) COUPLED(1, 1, amsgrad); else COUPLED(1, 0, amsgrad); }
  else { if (decay) COUPLED(0, 1, amsgrad); else COUPLED(0, 0, amsgrad); }
}

INLINE void any_rmsprop(Update *u, usize lo, usize hi, int near, int decay, int centered,
                        int momentum) {
  if (!centered || near) {
    if (decay) rmsprop(u, lo, hi, 1, centered, momentum, 1);
    else rmsprop(u, lo, hi, 1, centered, momentum, 0);
  } else {
    if (decay) rmsprop(u, lo, hi, 0, centered, momentum, 1);
    else rmsprop(u, lo, hi, 0, centered, momentum, 0);
  }
}

static void apply_rule(Update *u, usize lo, usize hi) {
  const int decay = u->scalars->weight_decay != 0;
  const int near1 = u->scalars->one_minus_beta1 < 0.5f;
  const int near2 = u->scalars->one_minus_beta2 < 0.5f;
  switch (u->rule) {
    case SGD: if (decay) sgd(u, lo, hi, 1); else sgd(u, lo, hi, 0); break;
    case MOMENTUM: if (decay) momentum(u, lo, hi, 1, 0); else momentum(u, lo, hi, 0, 0); break;
    case NESTEROV: if (decay) momentum(u, lo, hi, 1, 1); else momentum(u, lo, hi, 0, 1); break;
    case ADAMW: if (near1) adam(u, lo, hi, 1, 0, 0, 0); else adam(u, lo, hi, 0, 0, 0, 0); break;
    case ADAMW_AMSGRAD:
      if (near1) adam(u, lo, hi, 1, 0, 0, 1); else adam(u, lo, hi, 0, 0, 0, 1);
      break;
    case ADAM: coupled_adam(u, lo, hi, near1, decay, 0); break;
    case ADAM_AMSGRAD: coupled_adam(u, lo, hi, near1, decay, 1); break;
    case RMSPROP: any_rmsprop(u, lo, hi, near2, decay, 0, 0); break;
    case RMSPROP_MOMENTUM: any_rmsprop(u, lo, hi, near2, decay, 0, 1); break;
    case RMSPROP_CENTERED: any_rmsprop(u, lo, hi, near2, decay, 1, 0); break;
    case RMSPROP_CENTERED_MOMENTUM: any_rmsprop(u, lo, hi, near2, decay, 1, 1); break;
    case ADAGRAD: if (decay) adagrad(u, lo, hi, 1); else adagrad(u, lo, hi, 0); break;
    case LION: lion(u, lo, hi); break;
    case ADAFACTOR: adafactor(u, lo, hi); break;
    case SCHEDULE_FREE:
      if (decay) schedule_free(u, lo, hi, 1); else schedule_free(u, lo, hi, 0);
      break;
  }
}

/* The average is kept as its distance e from the parameters. A stretch's old parameters are copied,
   while they are in the cache. */
#define STRETCH 2048
static void update_range(void *call, usize lo, usize hi) {
  Update *u = call;
  if (!u->e) { apply_rule(u, lo, hi); return; }
  f32 *restrict const p = u->p; f32 *restrict const e = u->e;
  const float keep = u->scalars->average_keep;
  float before[STRETCH];
  u32 bad_e = 0;
  for (; lo < hi; lo += STRETCH) {
    const usize end = hi - lo < STRETCH ? hi : lo + STRETCH;
    for (usize i = lo; i < end; i++) before[i - lo] = p[i];
    apply_rule(u, lo, end);
    for (usize i = lo; i < end; i++) PUT(e, (e[i] + (before[i - lo] - p[i])) * keep);
  }
  __atomic_fetch_or(&u->not_finite, bad_e != 0, __ATOMIC_RELAXED);
}

#define STATES 5 /* arrays that an update changes: p, m, v, w and e, some of which a rule lacks */
#define PIECE (PIECE_BYTES / sizeof(f32))
#define CACHED 1024 /* values of each array that are hashed while the cache still has them */
typedef struct { Update update; u8 *hashes; usize count; } HashedUpdate;

/* `lo` begins a piece. */
static void hashed_update_range(void *call, usize lo, usize hi) {
  HashedUpdate *h = call;
  Update *u = &h->update;
  const u8 *const all[STATES] = {
    (const u8 *)u->p, (const u8 *)u->m, (const u8 *)u->v, (const u8 *)u->w, (const u8 *)u->e
  };
  const u8 *states[STATES];
  usize count = 0;
  for (int n = 0; n < STATES; n++) if (all[n]) states[count++] = all[n];
  const usize pieces = (h->count + PIECE - 1) / PIECE;
  for (usize from = lo; from < hi; from += PIECE) {
    const usize to = hi - from < PIECE ? hi : from + PIECE, bytes = (to - from) * sizeof(f32);
    Hash hashes[STATES];
    for (usize n = 0; n < count; n++) begin_hash(hashes + n);
    for (usize at = from; at < to; at += CACHED) {
      const usize end = to - at < CACHED ? to : at + CACHED;
      update_range(u, at, end);
      for (usize n = 0; n < count; n++)
        hash_blocks(hashes + n, states[n] + from * sizeof(f32), (end - from) * sizeof(f32), bytes);
    }
    if (bytes < SHORTEST_HASHED) return;
    for (usize n = 0; n < count; n++)
      end_hash(hashes + n, states[n] + from * sizeof(f32), bytes,
               h->hashes + (n * pieces + from / PIECE) * 16);
  }
}

/* Take one step in place, and hash the new values like `piece_hashes`: `hashes` has 16 bytes for
   each piece of p, then of those of m, v, w and e that are there; null if not wanted. Returns 0 if
   all new values are finite, else 1. */
u32 apply_update(u32 rule, const Scalars *scalars, f32 *p, const f32 *g, f32 *m, f32 *v, f32 *w,
                 f32 *e, u8 *hashes, usize count, u32 threads) {
  HashedUpdate call = {{p, g, m, v, w, e, scalars, rule, 0}, hashes, count};
  if (hashes) in_parallel(hashed_update_range, &call, count, PIECE, threads);
  else in_parallel(update_range, &call.update, count, 4096, threads);
  return call.update.not_finite;
}
