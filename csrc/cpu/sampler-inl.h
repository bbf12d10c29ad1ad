// Sequences of a task source, V::size at a time: weights beta, a query and its label, and the context as its
// Gram matrix or as tokens. Which draw is which, and why the Gram matrix has the distribution that it should
// have, is in fastlin/data: place.py, sources.py, bartlett.py. A Gram matrix of rank r = min(n, d) takes
// about r d - r^2 / 2 normals, r chi variates and r m^2 / 2 multiply-adds, whatever n is.

template <class T>
class Sampler {
  using V = Vec<T>;
  using L = Tile<T>;
  static constexpr std::int64_t N = V::size;
  enum Section : std::uint32_t { kTask, kBeta, kQuery, kFeatures, kNoise, kFactor, kChi };

 public:
  static constexpr std::int64_t kTokens = 4;  // drawn at a time: whole blocks, whatever d is

  Sampler(Arena& arena, const Source& source)
      : S(source),
        d(source.d),
        m(source.d + 1 + (source.bias ? 1 : 0)),
        constant(source.bias && source.n > 0 ? 1 : 0),
        rank(std::min(source.n - constant, source.d)),
        lanes(source.seed, source.step, source.stream) {
    beta = arena.take<T>(d * N);
    normals = arena.take<T>(std::max(kTokens * d, constant * d + rank * d - rank * (rank + 1) / 2 + 1) * N);
    noise = arena.take<T>(std::max(kTokens, constant + rank) * N);
    chi = arena.take<T>((d + 1) * N);
    rows = arena.take<T>((constant + rank) * m * N);
    before = arena.take<T>(S.feature_factor != nullptr ? std::max(kTokens, constant + rank) * d * N : 0);
    task_numbers = arena.take<T>(S.factors != nullptr ? (1 + d) * d : 0);
    task_lanes = arena.take<T>(S.factors != nullptr ? (1 + d) * d * N : 0);
    factor = arena.take<T>(S.feature_factor != nullptr ? d * d : 0);
    freedom = arena.take<std::int64_t>(d + 1);
    if (arena.only_counts()) return;
    for (std::int64_t i = 0; S.feature_factor != nullptr && i < d * d; ++i) {
      factor[i] = static_cast<T>(S.feature_factor[i]);
    }
    const std::int64_t below = S.n - constant;
    for (std::int64_t i = 0; i < d; ++i) freedom[i] = i < rank ? below - i : 0;
    freedom[d] = S.noise_std != 0 ? below - rank : 0;
  }

  // Task of sequence i of the call: at random, or in exact shares.
  static std::int64_t task(const Source& S, std::int64_t i, std::uint32_t word) {
    if (S.strata != nullptr) {
      return S.strata[(S.offset + static_cast<std::uint64_t>(i)) % static_cast<std::uint64_t>(S.period)];
    }
    const double u = (word + 0.5) * 0x1p-32;
    return std::min(S.K - 1, std::upper_bound(S.cumulative, S.cumulative + S.K, u) - S.cumulative);
  }

  // Takes sequences [lanes] of the call, with their tasks: all those of the first lane when it is `one_task`.
  // q [m, lanes], y [lanes].
  void question(const std::int64_t* sequence, const std::int64_t* task, bool one_task, T* q, T* y) {
    std::uint64_t index[N];
    for (int l = 0; l < N; ++l) index[l] = S.offset + static_cast<std::uint64_t>(sequence[l]);
    lanes.at(index);
    draw_beta(task, one_task);
    const bool noisy = S.noise_std != 0;
    lanes.normals(block(kQuery), d + (noisy ? 1 : 0), normals);
    if (S.bias) L::put(q, 0, V::set(T(1)));
    T* x = q + (S.bias ? N : 0);
    to_features(normals, 1, x, m);
    V label = L::dot(x, beta, d);
    if (noisy) label = fma(V::set(static_cast<T>(S.noise_std)), L::at(normals, d), label);
    label.store(y);
    L::put(q, m - 1, V::zero());
  }

  // G [m, m, lanes] of the contexts of these sequences.
  void gram(T* G) {
    const std::int64_t count = constant + rank;
    if (count == 0) {
      L::zero(G, m * m);
      return;
    }
    lanes.chi(block(kChi), freedom, S.noise_std != 0 ? d + 1 : rank, chi);
    lanes.normals(block(kFactor), constant * d + rank * d - rank * (rank + 1) / 2, normals);
    const bool plain = S.feature_factor == nullptr;
    T* triangle = plain ? rows + (S.bias ? N : 0) : before;
    fill_triangle(triangle, plain ? m : d);
    if (!plain) to_features(before, count, rows + (S.bias ? N : 0), m);
    if (S.noise_std != 0) lanes.normals(block(kNoise), count, noise);
    finish_tokens(rows, count, constant, static_cast<T>(std::sqrt(static_cast<double>(S.n))));
    symmetric_product(m, count, Across<T>{rows, m}, Across<T>{rows, m}, ToAcross<T>{G, m});
    if (S.noise_std != 0) {
      const V rest = V::set(static_cast<T>(S.noise_std)) * L::at(chi, d);
      L::put(G, m * m - 1, fma(rest, rest, L::at(G, m * m - 1)));
    }
  }

  // Tokens first ... first + count - 1 of these sequences, z [count, m, lanes]; first is a multiple of
  // kTokens and count at most that.
  void tokens(std::int64_t first, std::int64_t count, T* z) {
    const std::int64_t blocks = first / 4;
    lanes.normals(block(kFeatures) + static_cast<std::uint32_t>(blocks * d), count * d, normals);
    to_features(normals, count, z + (S.bias ? N : 0), m);
    if (S.noise_std != 0) {
      lanes.normals(block(kNoise) + static_cast<std::uint32_t>(blocks), count, noise);
    }
    finish_tokens(z, count, S.bias ? count : 0, T(1));
  }

 private:
  static std::uint32_t block(Section section) { return static_cast<std::uint32_t>(section) << 21; }

  // beta [d, lanes].
  void draw_beta(const std::int64_t* task, bool one_task) {
    if (S.factors == nullptr && S.means != nullptr) {
      for (std::int64_t i = 0; i < d; ++i) L::put(beta, i, V::set(static_cast<T>(S.means[i])));
      return;
    }
    lanes.normals(block(kBeta), d, normals);
    if (S.factors == nullptr) {
      put_on_sphere();
    } else if (one_task) {
      take_task(task[0]);
      for (std::int64_t i = 0; i < d; ++i) L::put(beta, i, V::broadcast(task_numbers + i));
      product(d, 1, d, NumbersAlong<T>{task_numbers + d, d}, Along<T>{normals, 0},
              ToAlong<T>{beta, 0, T(1), beta});
    } else {
      for (int l = 0; l < N; ++l) {
        take_task(task[l]);
        for (std::int64_t i = 0; i < (1 + d) * d; ++i) task_lanes[i * N + l] = task_numbers[i];
      }
      product(d, 1, d, Along<T>{task_lanes + d * N, d}, Along<T>{normals, 0},
              ToAlong<T>{beta, 0, T(1), task_lanes});
    }
  }

  // Mean and factor of a task as T, [1 + d, d]; those of the last one are kept.
  void take_task(std::int64_t task) {
    if (task == task_taken) return;
    task_taken = task;
    for (std::int64_t i = 0; i < d; ++i) task_numbers[i] = static_cast<T>(S.means[task * d + i]);
    const double* from = S.factors + task * d * d;
    for (std::int64_t i = 0; i < d * d; ++i) task_numbers[d + i] = static_cast<T>(from[i]);
  }

  void put_on_sphere() {
    T length[N];
    sqrt(L::dot(normals, normals, d)).store(length);
    for (int l = 0; l < N; ++l) length[l] = static_cast<T>(S.radius) / length[l];
    const V factor_of_lane = V::load(length);
    for (std::int64_t i = 0; i < d; ++i) L::put(beta, i, factor_of_lane * L::at(normals, i));
  }

  // x [count] of vectors [d], `stride` entries apart: the feature factor times standard normals [count, d].
  void to_features(const T* standard, std::int64_t count, T* x, std::int64_t stride) {
    if (S.feature_factor != nullptr) {
      product(d, count, d, NumbersAlong<T>{factor, d}, Along<T>{standard, d}, ToAlong<T>{x, stride});
      return;
    }
    for (std::int64_t i = 0; i < count; ++i) std::copy_n(standard + i * d * N, d * N, x + i * stride * N);
  }

  // The rows of the triangular factor, `stride` entries apart: that of the constant coordinate, then those
  // with a chi variate on the diagonal and normals to its right.
  void fill_triangle(T* to, std::int64_t stride) {
    const T* from = normals;
    if (constant != 0) {
      std::copy_n(from, d * N, to);
      from += d * N;
      to += stride * N;
    }
    for (std::int64_t i = 0; i < rank; ++i, to += stride * N) {
      L::zero(to, i);
      L::put(to, i, L::at(chi, i));
      std::copy_n(from, (d - 1 - i) * N, to + (i + 1) * N);
      from += (d - 1 - i) * N;
    }
  }

  // Labels of rows [count, m] that have their features, and the constant coordinate: `one` in the first
  // `ones` rows, 0 in the others.
  void finish_tokens(T* z, std::int64_t count, std::int64_t ones, T one) {
    const V deviation = V::set(static_cast<T>(S.noise_std));
    for (std::int64_t i = 0; i < count; ++i, z += m * N) {
      if (S.bias) L::put(z, 0, i < ones ? V::set(one) : V::zero());
      V label = L::dot(z + (S.bias ? N : 0), beta, d);
      if (S.noise_std != 0) label = fma(deviation, L::at(noise, i), label);
      L::put(z, m - 1, label);
    }
  }

  const Source& S;
  const std::int64_t d, m;
  const std::int64_t constant, rank;  // rows of the factor: of the constant coordinate, and below it
  Lanes<T> lanes;
  std::int64_t task_taken = -1;
  T* beta;                       // [d]
  T *normals, *noise, *chi;      // drawn
  T *rows, *before;              // [constant + rank, m], and their features before the factor
  T *task_numbers, *task_lanes;  // [1 + d, d] mean and factor: of one task, of the lanes' tasks
  T* factor;                     // [d, d] of the features
  std::int64_t* freedom;         // [d + 1]
};
