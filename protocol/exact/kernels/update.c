/* The exact update. Its definition is `_RULES` in protocol/exact/update.py: each line here is the
   same float32 operations in the same order. Multiplying by a clip or decay factor of 1 changes no
   value, so it needs no branch. Adding a product with a decay of 0 would turn -0.0 into 0.0, so
   it has one. */

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

#define FOR_RANGE for (usize i = lo; i < hi; i++)
#define LOAD_STATE                                                                            \
  f32 *restrict const p = u->p; const f32 *restrict const g = u->g;                      \
  f32 *restrict const m = u->m; f32 *restrict const v = u->v; f32 *restrict const w = u->w;  \
  const Scalars c = *u->scalars; u32 bad_p = 0, bad_m = 0, bad_v = 0, bad_w = 0;         \
  (void)m; (void)v; (void)w
#define REPORT_NOT_FINITE \
  __atomic_fetch_or(&u->not_finite, (bad_p | bad_m | bad_v | bad_w) != 0, __ATOMIC_RELAXED)
#define STORE(array, value)                                  \
  do {                                                     \
    const float put_ = (value);                            \
    array[i] = put_;                                       \
    bad_##array |= not_finite(put_);                       \
  } while (0)

/* Without clipping by value, `clip_value` is infinite and changes no value. */
INLINE float clip(Scalars c, float g) {
  const float scaled = g * c.clip;
  return scaled > c.clip_value ? c.clip_value : scaled < -c.clip_value ? -c.clip_value : scaled;
}

/* The clipped gradient, with coupled weight decay. */
INLINE float with_decay(Scalars c, float g, float p, int decay) {
  const float clipped = clip(c, g);
  return decay ? clipped + p * c.weight_decay : clipped;
}

/* Interpolate from the nearer end, for accuracy; `near` says whether that is the moment. */
INLINE float interpolate(float moment, float direction, float share, float keep, int near) {
  const float difference = direction - moment;
  return near ? moment + difference * share : direction - difference * keep;
}

INLINE float second_moment(Scalars c, float v, float direction) {
  return v * c.beta2 + (direction * c.one_minus_beta2) * direction;
}

/* The denominator of Adam's update. */
INLINE float denominator(Scalars c, float v) {
  return __builtin_sqrtf(v) * c.root_correction + c.epsilon;
}

INLINE float sign(float x) { return x > 0 ? 1.0f : x < 0 ? -1.0f : x == 0 ? 0.0f : x; }

INLINE void sgd(Update *u, usize lo, usize hi, int decay) {
  LOAD_STATE;
  FOR_RANGE {
    const float direction = with_decay(c, g[i], p[i], decay);
    STORE(p, p[i] - direction * c.learning_rate);
  }
  REPORT_NOT_FINITE;
}

INLINE void momentum(Update *u, usize lo, usize hi, int decay, int nesterov) {
  LOAD_STATE;
  FOR_RANGE {
    const float direction = with_decay(c, g[i], p[i], decay);
    const float velocity = m[i] * c.momentum + direction;
    STORE(m, velocity);
    const float step = nesterov ? direction + velocity * c.momentum : velocity;
    STORE(p, p[i] - step * c.learning_rate);
  }
  REPORT_NOT_FINITE;
}

/* `coupled` is adam, which adds the decay to the gradient; adamw decays the parameters instead. */
INLINE void adam(Update *u, usize lo, usize hi, int near, int coupled, int decay,
                 int amsgrad) {
  LOAD_STATE;
  FOR_RANGE {
    const float direction = coupled ? with_decay(c, g[i], p[i], decay) : clip(c, g[i]);
    const float start = coupled ? p[i] : p[i] * c.decay_factor;
    const float first = interpolate(m[i], direction, c.one_minus_beta1, c.beta1, near);
    const float second = second_moment(c, v[i], direction);
    STORE(m, first);
    STORE(v, second);
    const float largest = !amsgrad ? second : second > w[i] ? second : w[i];
    if (amsgrad) STORE(w, largest);
    STORE(p, start - first / denominator(c, largest) * c.step_size);
  }
  REPORT_NOT_FINITE;
}

INLINE void adagrad(Update *u, usize lo, usize hi, int decay) {
  LOAD_STATE;
  FOR_RANGE {
    const float direction = with_decay(c, g[i], p[i], decay);
    const float second = m[i] + direction * direction;
    STORE(m, second);
    STORE(p, p[i] - direction / (__builtin_sqrtf(second) + c.epsilon) * c.learning_rate);
  }
  REPORT_NOT_FINITE;
}

/* m is the second moment. With momentum, v is the velocity. If centered, the mean is the next of v
   and w. */
INLINE void rmsprop(Update *u, usize lo, usize hi, int near, int centered, int momentum,
                    int decay) {
  LOAD_STATE;
  FOR_RANGE {
    const float direction = with_decay(c, g[i], p[i], decay);
    const float second = second_moment(c, m[i], direction);
    STORE(m, second);
    float variance = second;
    if (centered) {
      const float earlier_mean = momentum ? w[i] : v[i];
      const float mean = interpolate(earlier_mean, direction, c.one_minus_beta2, c.beta2, near);
      if (momentum) STORE(w, mean); else STORE(v, mean);
      variance = second - mean * mean;
      variance = variance < 0 ? 0.0f : variance;
    }
    float step = direction / (__builtin_sqrtf(variance) + c.epsilon);
    if (momentum) {
      step = v[i] * c.momentum + step;
      STORE(v, step);
    }
    STORE(p, p[i] - step * c.learning_rate);
  }
  REPORT_NOT_FINITE;
}

/* g is the direction that `apply_adafactor` computed from the gradient. */
INLINE void adafactor(Update *u, usize lo, usize hi) {
  LOAD_STATE;
  FOR_RANGE STORE(p, p[i] * c.decay_factor - g[i] * c.learning_rate);
  REPORT_NOT_FINITE;
}

INLINE void lion(Update *u, usize lo, usize hi) {
  LOAD_STATE;
  FOR_RANGE {
    const float direction = clip(c, g[i]);
    const float mixed = direction * c.one_minus_beta1 + m[i] * c.beta1;
    STORE(p, p[i] * c.decay_factor - (sign(mixed) * c.learning_rate + 0.0f));
    STORE(m, m[i] * c.beta2 + direction * c.one_minus_beta2);
  }
  REPORT_NOT_FINITE;
}

INLINE void schedule_free(Update *u, usize lo, usize hi, int decay) {
  LOAD_STATE;
  FOR_RANGE {
    const float direction = clip(c, g[i]);
    const float second = second_moment(c, v[i], direction);
    STORE(v, second);
    const float scaled = direction / denominator(c, second);
    const float step = decay ? scaled + p[i] * c.weight_decay : scaled;
    STORE(p, (p[i] + m[i] * c.averaging) - step * c.step_size);
    STORE(m, (m[i] - step * c.drift) * c.one_minus_averaging);
  }
  REPORT_NOT_FINITE;
}

/* Constant arguments let the compiler generate a separate loop for each combination. */
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

/* The average is kept as its distance e from the parameters. The old parameters are copied
   for OLD_ELEMENTS at a time, so that they stay in the cache. */
#define OLD_ELEMENTS 2048
static void update_range(void *call, usize lo, usize hi) {
  Update *u = call;
  if (!u->e) { apply_rule(u, lo, hi); return; }
  f32 *restrict const p = u->p; f32 *restrict const e = u->e;
  const float keep = u->scalars->average_keep;
  float old[OLD_ELEMENTS];
  u32 bad_e = 0;
  for (; lo < hi; lo += OLD_ELEMENTS) {
    const usize end = hi - lo < OLD_ELEMENTS ? hi : lo + OLD_ELEMENTS;
    for (usize i = lo; i < end; i++) old[i - lo] = p[i];
    apply_rule(u, lo, end);
    for (usize i = lo; i < end; i++) STORE(e, (e[i] + (old[i - lo] - p[i])) * keep);
  }
  __atomic_fetch_or(&u->not_finite, bad_e != 0, __ATOMIC_RELAXED);
}

#define STATE_ARRAYS 5 /* arrays that an update changes: p, m, v, w and e; a rule may lack some */
#define PIECE_ELEMENTS (PIECE_BYTES / sizeof(f32))
#define CACHED_ELEMENTS 1024 /* updated, then hashed while they are in the cache */
typedef struct { Update update; u8 *hashes; usize count; } HashedUpdate;

/* Update and hash elements [lo, hi); `lo` is a multiple of PIECE_ELEMENTS. */
static void hashed_update_range(void *call, usize lo, usize hi) {
  HashedUpdate *h = call;
  Update *u = &h->update;
  const u8 *const all[STATE_ARRAYS] = {
    (const u8 *)u->p, (const u8 *)u->m, (const u8 *)u->v, (const u8 *)u->w, (const u8 *)u->e
  };
  const u8 *states[STATE_ARRAYS];
  usize count = 0;
  for (int n = 0; n < STATE_ARRAYS; n++) if (all[n]) states[count++] = all[n];
  const usize pieces = (h->count + PIECE_ELEMENTS - 1) / PIECE_ELEMENTS;
  for (usize from = lo; from < hi; from += PIECE_ELEMENTS) {
    const usize to = hi - from < PIECE_ELEMENTS ? hi : from + PIECE_ELEMENTS;
    const usize bytes = (to - from) * sizeof(f32);
    Hash hashes[STATE_ARRAYS];
    for (usize n = 0; n < count; n++) begin_hash(hashes + n);
    for (usize start = from; start < to; start += CACHED_ELEMENTS) {
      const usize end = to - start < CACHED_ELEMENTS ? to : start + CACHED_ELEMENTS;
      update_range(u, start, end);
      for (usize n = 0; n < count; n++)
        hash_blocks(hashes + n, states[n] + from * sizeof(f32), (end - from) * sizeof(f32), bytes);
    }
    if (bytes < SHORTEST_HASHED) return;
    for (usize n = 0; n < count; n++)
      end_hash(hashes + n, states[n] + from * sizeof(f32), bytes,
               h->hashes + (n * pieces + from / PIECE_ELEMENTS) * 16);
  }
}

/* Take one step in place, and hash the new values like `piece_hashes`: `hashes` receives
   16 bytes for each piece of p, then of those of m, v, w and e that are not null; null: no hashes.
   Return 0 if all new values are finite, else 1. */
u32 apply_update(u32 rule, const Scalars *scalars, f32 *p, const f32 *g, f32 *m, f32 *v, f32 *w,
                 f32 *e, u8 *hashes, usize count, u32 threads) {
  HashedUpdate call = {{p, g, m, v, w, e, scalars, rule, 0}, hashes, count};
  if (hashes) in_parallel(hashed_update_range, &call, count, PIECE_ELEMENTS, threads);
  else in_parallel(update_range, &call.update, count, 4096, threads);
  return call.update.not_finite;
}
