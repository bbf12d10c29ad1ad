// One layer for many trials: lanes are trials, which share the numbers q and G of a sequence. The letters are
// those of lanes_are_sequences-inl.h.
//   a = W' q     c = P v + G v     yhat = scale sum_h a . c + rho q . h     g = scale r
//   dW = sum q (g c)'     sum of G (g a)     sum of r q
// No sum runs over lanes, and all lanes have the same task.
//
// A vector of trials runs through the whole chunk, a few sequences at a time: W, dW, and the a, c and e of
// these sequences stay in L1, 41 KiB at m = 11 with AVX-512, while G, 0.5 KiB a sequence, comes from L2. A
// number of G serves c = G v and e = G a once it is loaded. At m = 11 with gradients a vector of 16 trials
// takes 324 cycles a sequence on Zen 5: 69 for a, 137 for c, e and a . c, 69 for dW, 31 for the errors and
// the other sums, 17 for parameters and for adding dW in double. Its 484 multiply-adds take 242 at best.
//
// Three vectors at a time would load each number of G once for all of them, but move a and c to L2 and
// back: 1.10 ms against 1.03 ms (50 trials, 2048 sequences). Lanes without a trial repeat the last one
// (plan.h).

template <class T>
class LanesAreTrials {
  using V = Vec<T>;
  using L = Tile<T>;
  static constexpr std::int64_t N = V::size;
  static constexpr std::int64_t kPart = 12;  // sequences at a time; 8 ... 24 take at most 1.03 times as long

 public:
  LanesAreTrials(Arena& arena, const Plan<T>& plan, const Results<T>& out, const Chunk<T>& chunk)
      : P(plan.problem),
        out(out),
        at(plan.record),
        chunk(chunk),
        m(plan.problem.m),
        gradients(out.dW || out.dv || out.dh || out.dp),
        trials(plan.lane_trials),
        used(plan.problem.source != nullptr ? m - 1 : m) {
    if (trials == 0) return;
    const std::int64_t sequences = plan.tiles * N;
    G = arena.take<T>(sequences * m * m);
    q = arena.take<T>(sequences * m);
    W = arena.take<T>((trials + N - 1) / N * N * P.H * m * m);
    v = arena.take<T>(P.H * m * N);
    base = arena.take<T>(P.H * m * N);
    h = arena.take<T>(P.h != nullptr ? m * N : 0);
    p = arena.take<T>(P.t * m * N);
    a = arena.take<T>(P.H * kPart * m * N);
    ce = arena.take<T>(P.H * kPart * 2 * m * N);
    attended = arena.take<T>(kPart * N);
    residuals = arena.take<T>(kPart * N);
    slopes = arena.take<T>(kPart * N);
    sums = arena.take<T>(at.width * N);
    dW = arena.take<T>(out.dW != nullptr ? P.H * m * m * N : 0);
  }

  // Loads the Gram matrices [m, m, lanes] and the queries of a tile of the chunk.
  void load_tile(std::int64_t tile, const T* matrices) {
    const int lanes = chunk.lanes(tile);
    T *G_rows[N], *q_rows[N];
    for (int l = 0; l < lanes; ++l) {
      G_rows[l] = G + (tile * N + l) * m * m;
      q_rows[l] = q + (tile * N + l) * m;
    }
    L::store(matrices, m * m, G_rows, 0, lanes);
    L::store(chunk.q + tile * m * N, m, q_rows, 0, lanes);
  }

  // Adds the sums of the chunk to records [runs, R, width] and block_dW [R, H, m, m]. Returns false if the
  // call must stop.
  bool run(double* records, double* block_dW, Stop& stop, int thread) {
    if (!W_is_laid_out) lay_out_W();
    for (first_trial = 0; first_trial < trials; first_trial += N) {
      if (out.dW != nullptr) L::zero(dW, P.H * m * m);
      for (std::int64_t begin = 0, end = 0; begin < chunk.count; begin = end) {
        const std::int64_t run = chunk.run[begin];
        while (end < chunk.count && chunk.run[end] == run) ++end;
        if (stop.requested(thread)) return false;
        load_parameters(chunk.task[begin]);
        L::zero(sums, at.width);
        for (std::int64_t first = begin; first < end; first += kPart) {
          run_part(first, std::min(kPart, end - first));
        }
        L::add_to_rows(sums, at.width, lanes(), records + (run * P.R + first_trial) * at.width);
      }
      if (out.dW != nullptr) {
        L::add_to_rows(dW, P.H * m * m, lanes(), block_dW + first_trial * P.H * m * m);
      }
    }
    return true;
  }

 private:
  // How many lanes of the current vector have a trial; the others repeat the last one.
  int lanes() const { return static_cast<int>(std::min(N, trials - first_trial)); }
  std::int64_t trial(std::int64_t index) const { return std::min(index, trials - 1); }

  // tile [size, lanes]: the rows at values + trial * stride of V::size trials.
  void by_trial(std::int64_t first, const T* values, std::int64_t stride, std::int64_t size, T* tile) const {
    const T* rows[N];
    for (int l = 0; l < N; ++l) rows[l] = values + trial(first + l) * stride;
    L::load(rows, 0, size, tile);
  }

  void lay_out_W() {
    const std::int64_t size = P.H * m * m;
    for (std::int64_t r = 0; r < trials; r += N) by_trial(r, P.W, size, size, W + r * size);
    W_is_laid_out = true;
  }

  // Loads v, h and the prompt's part of c.
  void load_parameters(std::int64_t task) {
    if (P.h != nullptr) by_trial(first_trial, P.h + task * m, P.K * m, m, h);
    if (P.p != nullptr) by_trial(first_trial, P.p + task * P.t * m, P.K * P.t * m, P.t * m, p);
    L::zero(base, P.H * m);
    for (std::int64_t head = 0; head < P.H; ++head) {
      T *to = v + head * m * N, *prompted = base + head * m * N;
      by_trial(first_trial, P.v_of(head, task), P.H * (P.shares_v ? 1 : P.K) * m, m, to);
      for (std::int64_t t = 0; P.p != nullptr && t < P.t; ++t) {
        Streamed<T>::template add_tokens<1, false>(p + t * m * N, m, to, nullptr, prompted, nullptr);
      }
    }
  }

  // Runs sequences first ... first + count - 1 of the chunk, which have one task.
  void run_part(std::int64_t first, std::int64_t count) {
    const T *Gs = G + first * m * m, *qs = q + first * m;
    L::zero(attended, count);
    for (std::int64_t head = 0; head < P.H; ++head) {
      const T* Wh = W + (first_trial * P.H + head * N) * m * m;
      product(count, m, used, NumbersAlong<T>{qs, m}, Across<T>{Wh, m}, ToAcross<T>{a_of(head), m});
      if (at.e >= 0) {
        apply<true>(head, Gs, count);
      } else {
        apply<false>(head, Gs, count);
      }
    }
    find_errors(first, count);
    if (!gradients) return;
    if (at.q >= 0) {
      T* sum = sums + at.q * N;
      product(used, 1, count, NumbersAcross<T>{qs, m}, Across<T>{residuals, 1},
              ToAlong<T>{sum, 0, T(1), sum});
    }
    for (std::int64_t head = 0; head < P.H; ++head) {
      if (at.e >= 0) {
        T* sum = sums + (at.e + head * m) * N;
        product(m, 1, count, Across<T>{c_of(head) + m * N, 2 * m}, Across<T>{slopes, 1},
                ToAlong<T>{sum, 0, T(1), sum});
      }
      if (out.dW == nullptr) continue;
      T *cs = c_of(head), *to = dW + head * m * m * N;
      scale(slopes, m, count, cs);
      product(used, m, count, NumbersAcross<T>{qs, m}, Across<T>{cs, 2 * m}, ToAcross<T>{to, m, T(1), to});
    }
  }

  T* a_of(std::int64_t head) { return a + head * kPart * m * N; }
  T* c_of(std::int64_t head) { return ce + head * kPart * 2 * m * N; }

  // c = base + G v, a . c, which is added to `attended`, and with kE e = G a, of `count` sequences with the
  // matrices Gs [count, m, m].
  template <bool kE>
  void apply(std::int64_t head, const T* Gs, std::int64_t count) {
    const T* vs = v + head * m * N;
    for (std::int64_t i = 0, rows = 0; i < m; i += rows) {
      rows = rows_at_once(m - i, kProductRows);
      apply_rows<kProductRows, kE>(rows, m, count, Gs + i, vs, a_of(head), a_of(head) + i * N,
                                   base + (head * m + i) * N, c_of(head) + i * N, attended);
    }
  }

  // `rows` rows of that, I or fewer, in registers; ai [count, m] is a, from the first of these rows on. A
  // number of G serves c and e once it is loaded.
  template <int I, bool kE>
  FASTLIN_NOINLINE static void apply_rows(std::int64_t rows, std::int64_t m, std::int64_t count, const T* G,
                                          const T* v, const T* a, const T* ai, const T* base, T* c,
                                          T* attended) {
    if constexpr (I > 1) {
      if (rows < I) return apply_rows<I - 1, kE>(rows, m, count, G, v, a, ai, base, c, attended);
    }
    for (std::int64_t s = 0; s < count; ++s, ai += m * N, c += 2 * m * N) {
      V cs[I], es[I];
      FASTLIN_UNROLL
      for (int i = 0; i < I; ++i) cs[i] = L::at(base, i), es[i] = V::zero();
      const T* vk = v;
      for (std::int64_t k = 0; k < m; ++k, G += m, vk += N, a += N) {
        const V with_c = V::load(vk), with_e = kE ? V::load(a) : V::zero();
        FASTLIN_UNROLL
        for (int i = 0; i < I; ++i) {
          const V Gi = V::broadcast(G + i);
          cs[i] = fma(Gi, with_c, cs[i]);
          if (kE) es[i] = fma(Gi, with_e, es[i]);
        }
      }
      V sum = L::at(attended, s);
      FASTLIN_UNROLL
      for (int i = 0; i < I; ++i) {
        sum = fma(L::at(ai, i), cs[i], sum);
        L::put(c, i, cs[i]);
        if (kE) L::put(c + m * N, i, es[i]);
      }
      L::put(attended, s, sum);
    }
  }

  // r and g of each sequence; c becomes g c.
  void find_errors(std::int64_t first, std::int64_t count) {
    const Head<T> head(P, out);
    V squares = V::zero();
    for (std::int64_t s = 0; s < count; ++s) {
      const V r = head.error(L::at(attended, s), TrialsOf{*this, first + s}, squares);
      L::put(residuals, s, r);
      L::put(slopes, s, head.scale * r);
    }
    if (at.squares >= 0) L::put(sums, at.squares, L::at(sums, at.squares) + squares);
  }

  // values [count, 2, m]: multiplies the first of each two vectors by that sequence's g.
  static void scale(const T* slopes, std::int64_t m, std::int64_t count, T* values) {
    for (std::int64_t s = 0; s < count; ++s, values += 2 * m * N) {
      const V g = L::at(slopes, s);
      for (std::int64_t j = 0; j < m; ++j) L::put(values, j, g * L::at(values, j));
    }
  }

  // The trials of a sequence, for the head.
  struct TrialsOf {
    const LanesAreTrials& all;
    const std::int64_t position;

    V target() const { return V::broadcast(all.chunk.y + position); }
    V coefficient() const { return V::broadcast(all.chunk.coefficient + position); }
    V skipped() const {
      V sum = V::zero();
      const T* numbers = all.q + position * all.m;
      for (std::int64_t j = 0; j < all.m; ++j) sum = fma(V::broadcast(numbers + j), L::at(all.h, j), sum);
      return sum;
    }
    V slope() const {
      T lanes[N];
      for (int l = 0; l < N; ++l) lanes[l] = all.P.gy[index(l)];
      return V::load(lanes);
    }
    void store(V yhat) const {
      T lanes[N];
      yhat.store(lanes);
      for (int l = 0; l < all.lanes(); ++l) all.out.yhat[index(l)] = lanes[l];
    }
    std::int64_t index(int lane) const {
      return all.trial(all.first_trial + lane) * all.P.B + all.chunk.sequence[position];
    }
  };

  const Problem<T>& P;
  const Results<T>& out;
  const Record& at;
  const Chunk<T>& chunk;
  const std::int64_t m;
  const bool gradients;
  const std::int64_t trials;     // the first trials of the call
  const std::int64_t used;       // entries of q that may differ from 0: a drawn query has no label
  std::int64_t first_trial = 0;  // of the current vector
  bool W_is_laid_out = false;
  T *G = nullptr, *q = nullptr;     // [sequences, m, m], [sequences, m] numbers
  T* W = nullptr;                   // [trials / lanes, H, m, m]
  T *v = nullptr, *base = nullptr;  // [H, m]; the prompt's part of c
  T *h = nullptr, *p = nullptr;     // [m], [t, m]
  T* a = nullptr;                   // [H, part, m]
  T* ce = nullptr;                  // [H, part, 2, m]: c, then g c; e
  T* attended = nullptr;            // [part]: the sum of a . c over the heads
  T* slopes = nullptr;              // [part]: g
  T* residuals = nullptr;           // [part]: dloss/dyhat
  T* sums = nullptr;                // [width]
  T* dW = nullptr;                  // [H, m, m]
};
