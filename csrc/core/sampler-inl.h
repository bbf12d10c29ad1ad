// Draws sequences of a task source, V::size at a time: the weights beta, a query and its label, and the
// context as a Gram matrix, as rows of its triangular factor, or as tokens. fastlin/data documents which draw
// is which (place.py, sources.py) and why the Gram matrix has the right distribution (bartlett.py). A Gram
// matrix of rank r = min(n, d) takes about r d - r^2 / 2 normals, r chi variates and r m^2 / 2 multiply-adds,
// for any n.

template <class T>
class Sampler {
  using V = Vec<T>;
  using L = Tile<T>;
  static constexpr std::int64_t N = V::size;

 public:
  // Kinds of draws, and the first block of each.
  enum Section : std::uint32_t { kTask, kBeta, kQuery, kFeatures, kNoise, kFactor, kChi };
  FASTLIN_HD static std::uint32_t block(Section section) { return static_cast<std::uint32_t>(section) << 21; }

  static constexpr std::int64_t kTokens = 4;  // tokens drawn at a time: they use whole blocks for any d

  FASTLIN_HD Sampler(Arena& arena, const Source& source)
      : S(source),
        d(source.d),
        m(source.d + 1 + (source.bias ? 1 : 0)),
        constant(source.bias && source.n > 0 ? 1 : 0),
        rank(std::min(source.n - constant, source.d)),
        lanes(source.seed, current_step(source), source.stream) {
    beta = arena.take<T>(d * N);
    normals = arena.take<T>(whole_blocks(std::max(std::max(kTokens * d, normals_of_rows()), 4 * rank)) * N);
    noise = arena.take<T>(whole_blocks(std::max(+kTokens, constant + rank)) * N);
    chi = arena.take<T>((d + 1) * N);
    rows = arena.take<T>((constant + rank) * m * N);
    before = arena.take<T>(S.feature_factor != nullptr ? std::max(+kTokens, constant + rank) * d * N : 0);
    task_numbers = arena.take<T>(S.factors != nullptr ? (1 + d) * d : 0);
    task_lanes = arena.take<T>(S.factors != nullptr ? (1 + d) * d * N : 0);
    factor = arena.take<T>(S.feature_factor != nullptr ? d * d : 0);
    freedom = arena.take<Freedom>(rank + 1);
    if (arena.only_counts()) return;
    if (S.feature_factor != nullptr) L::round(S.feature_factor, d * d, factor);
    const std::int64_t below = S.n - constant;
    L::for_each_number(rank + 1, [=](std::int64_t i) { freedom[i] = Freedom(below - i); });
  }

  // Task of sequence i of the call: random, or in exact shares.
  FASTLIN_HD static std::int64_t task(const Source& S, std::int64_t i, std::uint32_t word) {
    if (S.strata != nullptr) {
      return S.strata[(S.offset + static_cast<std::uint64_t>(i)) % static_cast<std::uint64_t>(S.period)];
    }
    const double u = (word + 0.5) * 0x1p-32;
    std::int64_t first = 0, last = S.K - 1;  // finds the first task whose sum is above u, else the last
    while (first < last) {
      const std::int64_t middle = first + (last - first) / 2;
      const bool above = S.cumulative[middle] > u;  // as random as u: a branch would be mispredicted
      last = above ? middle : last;
      first = above ? first : middle + 1;
    }
    return first;
  }

  // Starts sequences [lanes] of the call with their tasks, and draws q [m, lanes] and y [lanes]. With
  // `one_task` all lanes have the task of the first.
  FASTLIN_HD void question(const std::int64_t* sequence, const std::int64_t* task, bool one_task, T* q,
                           T* y) {
    lanes.seek(S.offset, sequence);
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

  // The triangular factor of a context, as random numbers: row 0 of the constant coordinate, then rows with a
  // chi variate on the diagonal and normals to its right. bartlett.py has the labels.
  struct Rows {
    std::int64_t constant, rank;
    const T *beta, *factor;  // [d] of each lane; [d, d] numbers, null without a feature factor
    const T* normals;        // row after row, without the diagonal
    const T *chi, *noise;    // [rank], and at d that of the remainder; [constant + rank]
  };
  FASTLIN_HD Rows rows_of_factor() const {
    return {constant, rank, beta, S.feature_factor != nullptr ? factor : nullptr, normals, chi, noise};
  }
  FASTLIN_HD const Source& source() const { return S; }

  FASTLIN_HD void draw_rows() {
    lanes.chi(block(kChi), freedom, rank, normals, chi);
    lanes.normals(block(kFactor), normals_of_rows(), normals);
    if (S.noise_std == 0) return;
    const std::uint32_t remainder = block(kChi) + static_cast<std::uint32_t>(kBlocksPerChi * d);
    lanes.chi(remainder, freedom + rank, 1, noise, chi + d * N);
    lanes.normals(block(kNoise), constant + rank, noise);
  }

  // Draws the Gram matrices G [m, m, lanes] of the contexts.
  FASTLIN_HD void gram(T* G) {
    const std::int64_t count = constant + rank;
    if (count == 0) {
      L::zero(G, m * m);
      return;
    }
    draw_rows();
    const bool plain = S.feature_factor == nullptr;
    T* triangle = plain ? rows + (S.bias ? N : 0) : before;
    fill_triangle(triangle, plain ? m : d);
    if (!plain) to_features(before, count, rows + (S.bias ? N : 0), m);
    finish_tokens(rows, count, constant, static_cast<T>(std::sqrt(static_cast<double>(S.n))));
    symmetric_product(m, count, Across<T>{rows, m}, Across<T>{rows, m}, ToAcross<T>{G, m});
    if (S.noise_std != 0) {
      const V rest = V::set(static_cast<T>(S.noise_std)) * L::at(chi, d);
      L::put(G, m * m - 1, fma(rest, rest, L::at(G, m * m - 1)));
    }
  }

  // Draws tokens first ... first + count - 1, z [count, m, lanes]. `first` is a multiple of kTokens, and
  // count <= kTokens.
  FASTLIN_HD void tokens(std::int64_t first, std::int64_t count, T* z) {
    const std::int64_t blocks = first / 4;
    lanes.normals(block(kFeatures) + static_cast<std::uint32_t>(blocks * d), count * d, normals);
    to_features(normals, count, z + (S.bias ? N : 0), m);
    if (S.noise_std != 0) {
      lanes.normals(block(kNoise) + static_cast<std::uint32_t>(blocks), count, noise);
    }
    finish_tokens(z, count, S.bias ? count : 0, T(1));
  }

 private:
  FASTLIN_HD std::int64_t normals_of_rows() const { return constant * d + rank * d - rank * (rank + 1) / 2; }
  FASTLIN_HD static std::int64_t whole_blocks(std::int64_t draws) { return (draws + 3) / 4 * 4; }

  // beta [d, lanes].
  FASTLIN_HD void draw_beta(const std::int64_t* task, bool one_task) {
    if (S.factors == nullptr && S.means != nullptr) {
      for (std::int64_t i = 0; i < d; ++i) L::put(beta, i, V::set(static_cast<T>(S.means[i])));
      return;
    }
    lanes.normals(block(kBeta), d, normals);
    if (S.factors == nullptr) {
      put_on_sphere();
    } else if (one_task) {
      load_task(task[0]);
      for (std::int64_t i = 0; i < d; ++i) L::put(beta, i, V::broadcast(task_numbers + i));
      product_column(d, d, NumbersAlong<T>{task_numbers + d, d}, Along<T>{normals, 0},
                     ToAlong<T>{beta, 0, T(1), beta});
    } else {
      L::round_by_task(S.means, task, d, task_lanes);
      L::round_by_task(S.factors, task, d * d, task_lanes + d * N);
      product_column(d, d, Along<T>{task_lanes + d * N, d}, Along<T>{normals, 0},
                     ToAlong<T>{beta, 0, T(1), task_lanes});
    }
  }

  // Mean and factor of a task as T, [1 + d, d], unless they are loaded already.
  FASTLIN_HD void load_task(std::int64_t task) {
    if (task == loaded_task) return;
    loaded_task = task;
    L::round(S.means + task * d, d, task_numbers);
    L::round(S.factors + task * d * d, d * d, task_numbers + d);
  }

  FASTLIN_HD void put_on_sphere() {
    const V stretch = V::set(static_cast<T>(S.radius)) / sqrt(L::dot(normals, normals, d));
    for (std::int64_t i = 0; i < d; ++i) L::put(beta, i, stretch * L::at(normals, i));
  }

  // x = feature factor times standard normals [count, d]; the `count` vectors of x are `stride` entries
  // apart.
  FASTLIN_HD void to_features(const T* standard, std::int64_t count, T* x, std::int64_t stride) {
    if (S.feature_factor != nullptr) {
      product(d, count, d, NumbersAlong<T>{factor, d}, Along<T>{standard, d}, ToAlong<T>{x, stride});
      return;
    }
    for (std::int64_t i = 0; i < count; ++i) L::copy(standard + i * d * N, d, x + i * stride * N);
  }

  // Rows of the triangular factor, `stride` entries apart: first that of the constant coordinate, then rows
  // with a chi variate on the diagonal and normals to its right.
  FASTLIN_HD void fill_triangle(T* to, std::int64_t stride) {
    const T* from = normals;
    if (constant != 0) {
      L::copy(from, d, to);
      from += d * N;
      to += stride * N;
    }
    for (std::int64_t i = 0; i < rank; ++i, to += stride * N) {
      L::zero(to, i);
      L::put(to, i, L::at(chi, i));
      L::copy(from, d - 1 - i, to + (i + 1) * N);
      from += (d - 1 - i) * N;
    }
  }

  // Adds the label to rows [count, m] that have their features, and the constant coordinate: `one` in the
  // first `ones` rows, 0 in the others.
  FASTLIN_HD void finish_tokens(T* z, std::int64_t count, std::int64_t ones, T one) {
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
  const std::int64_t constant, rank;  // rows of the factor: for the constant coordinate, and below it
  Lanes<T> lanes;
  std::int64_t loaded_task = -1;
  T* beta;                       // [d]
  T *normals, *noise, *chi;      // random numbers
  T *rows, *before;              // [constant + rank, m]; [.., d] standard features, before feature_factor
  T *task_numbers, *task_lanes;  // [1 + d, d] mean and factor: of one task; of each lane's task
  T* factor;                     // [d, d] feature_factor as T
  Freedom* freedom;              // [rank + 1] of the diagonal, and of the remainder of the labels
};
