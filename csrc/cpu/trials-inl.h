// One layer for many trials: lanes are trials, which share the numbers q and G of a sequence. The letters are
// those of attention-inl.h.
//   a = W' q     c = P v + G v     yhat = scale sum_h a . c + rho q . h     g = scale r
//   dW = sum q (g c)'     sum of G (g a)     sum of r q
// No sum runs over lanes, and all lanes have the same task.
//
// A vector of trials runs through the whole chunk, a few sequences at a time: W, dW, and the a and c of these
// sequences stay in L1, 37 KiB at m = 11 with AVX-512, while G, 0.5 KiB a sequence, comes from L2. Three
// vectors at a time would load each number of G once for all of them, but move a and c to L2 and back: 1.10
// ms against 1.03 ms (50 trials, 2048 sequences). The remaining trials, which do not fill a vector, run with
// sequences in lanes.

template <class T>
class LaneTrials {
  using V = Vec<T>;
  using L = Tile<T>;
  static constexpr std::int64_t N = V::size;
  static constexpr std::int64_t kPart = 16;  // sequences at a time; 8 ... 16 take the same time

 public:
  LaneTrials(Arena& arena, const Plan<T>& plan, const Results<T>& out, const Chunk<T>& chunk)
      : P(plan.problem),
        out(out),
        at(plan.record),
        chunk(chunk),
        m(plan.problem.m),
        gradients(out.dW || out.dv || out.dh || out.dp),
        trials(plan.lane_trials) {
    if (trials == 0) return;
    const std::int64_t sequences = plan.tiles * N;
    G = arena.take<T>(sequences * m * m);
    q = arena.take<T>(sequences * m);
    W = arena.take<T>(trials * P.H * m * m);
    v = arena.take<T>(P.H * m * N);
    base = arena.take<T>(P.H * m * N);
    h = arena.take<T>(P.h != nullptr ? m * N : 0);
    p = arena.take<T>(P.t * m * N);
    a = arena.take<T>(P.H * kPart * m * N);
    c = arena.take<T>(P.H * kPart * m * N);
    residuals = arena.take<T>(kPart * N);
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
        L::add_to_rows(sums, at.width, records + (run * P.R + first_trial) * at.width);
      }
      if (out.dW != nullptr) L::add_to_rows(dW, P.H * m * m, block_dW + first_trial * P.H * m * m);
    }
    return true;
  }

 private:
  // tile [size, lanes]: the rows at values + trial * stride of V::size trials.
  void by_trial(std::int64_t first, const T* values, std::int64_t stride, std::int64_t size, T* tile) const {
    const T* rows[N];
    for (int l = 0; l < N; ++l) rows[l] = values + (first + l) * stride;
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
    for (std::int64_t head = 0; head < P.H; ++head) {
      const T* Wh = W + (first_trial * P.H + head * N) * m * m;
      product(count, m, m, NumbersAlong<T>{qs, m}, Across<T>{Wh, m}, ToAcross<T>{a_of(head), m});
      for (std::int64_t s = 0; s < count; ++s) {
        add_column(m, m, Gs + s * m * m, v + head * m * N, base + head * m * N, c_of(head) + s * m * N);
      }
    }
    predict(first, count);
    if (at.q >= 0) add_column(m, count, qs, residuals, sums + at.q * N, sums + at.q * N);
    for (std::int64_t head = 0; head < P.H; ++head) {
      if (at.e >= 0) {
        // G is symmetric: the rows of all matrices form one factor [count m, m].
        T* sum = sums + (at.e + head * m) * N;
        add_column(m, count * m, Gs, a_of(head), sum, sum);
      }
      if (out.dW != nullptr) {
        T* to = dW + head * m * m * N;
        product(m, m, count, NumbersAcross<T>{qs, m}, Across<T>{c_of(head), m}, ToAcross<T>{to, m, T(1), to});
      }
    }
  }

  T* a_of(std::int64_t head) { return a + head * kPart * m * N; }
  T* c_of(std::int64_t head) { return c + head * kPart * m * N; }

  // Predictions and errors; a and c become g a and g c.
  void predict(std::int64_t first, std::int64_t count) {
    const V scale = V::set(static_cast<T>(P.scale)), rho = V::set(static_cast<T>(P.last_skip));
    V squares = V::zero();
    for (std::int64_t s = 0; s < count; ++s) {
      const std::int64_t position = first + s, sequence = chunk.sequence[position];
      V attended = V::zero();
      for (std::int64_t head = 0; head < P.H; ++head) {
        attended = attended + L::dot(a_of(head) + s * m * N, c_of(head) + s * m * N, m);
      }
      V yhat = scale * attended;
      if (P.h != nullptr) yhat = fma(rho, dot_h(q + position * m), yhat);
      if (out.yhat != nullptr) scatter_yhat(sequence, yhat);
      V r = V::zero();
      if (P.has_targets()) {
        const V difference = yhat - V::broadcast(chunk.y + position);
        squares = fma(difference, difference, squares);
        r = (difference + difference) * V::broadcast(chunk.coefficient + position);
      } else if (P.gy != nullptr) {
        r = gather_gy(sequence);
      }
      if (!gradients) continue;
      L::put(residuals, s, r);
      for (std::int64_t head = 0; head < P.H; ++head) {
        multiply(scale * r, m, a_of(head) + s * m * N, c_of(head) + s * m * N);
      }
    }
    if (at.squares >= 0) L::put(sums, at.squares, L::at(sums, at.squares) + squares);
  }

  static void multiply(V g, std::int64_t m, T* a, T* c) {
    for (std::int64_t j = 0; j < m; ++j) {
      L::put(c, j, g * L::at(c, j));
      L::put(a, j, g * L::at(a, j));
    }
  }

  // q . h of one sequence.
  V dot_h(const T* numbers) const {
    V sum = V::zero();
    for (std::int64_t j = 0; j < m; ++j) sum = fma(V::broadcast(numbers + j), L::at(h, j), sum);
    return sum;
  }

  void scatter_yhat(std::int64_t sequence, V yhat) {
    T lanes[N];
    yhat.store(lanes);
    for (int l = 0; l < N; ++l) out.yhat[(first_trial + l) * P.B + sequence] = lanes[l];
  }

  V gather_gy(std::int64_t sequence) const {
    T lanes[N];
    for (int l = 0; l < N; ++l) lanes[l] = P.gy[(first_trial + l) * P.B + sequence];
    return V::load(lanes);
  }

  const Problem<T>& P;
  const Results<T>& out;
  const Record& at;
  const Chunk<T>& chunk;
  const std::int64_t m;
  const bool gradients;
  const std::int64_t trials;     // the first trials of the call, in whole vectors
  std::int64_t first_trial = 0;  // of the current vector
  bool W_is_laid_out = false;
  T *G = nullptr, *q = nullptr;     // [sequences, m, m], [sequences, m] numbers
  T* W = nullptr;                   // [trials / lanes, H, m, m]
  T *v = nullptr, *base = nullptr;  // [H, m]; the prompt's part of c
  T *h = nullptr, *p = nullptr;     // [m], [t, m]
  T *a = nullptr, *c = nullptr;     // [H, part, m]
  T* residuals = nullptr;           // [part]: dloss/dyhat
  T* sums = nullptr;                // [width]
  T* dW = nullptr;                  // [H, m, m]
};
