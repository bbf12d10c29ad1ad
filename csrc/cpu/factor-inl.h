// A drawn context as the rows of its triangular factor (fastlin/data/bartlett.py): G = R'R is never formed.
// Let F be the feature factor (I without one), g_i and s the label noise. A row is [X_i; y_i] with X_i = F
// R_i and y_i = X_i . beta + s g_i, so that labels need not be computed either:
//   u = F' (v_x + beta v_y)     w_i = R_i . u + s g_i v_y     x = F sum_i R_i w_i
//   c_x = x     c_y = beta . x + s sum_i g_i w_i + rest^2 v_y
// The row of the constant coordinate adds sqrt n v_0 to its w_0, and c_0 = sqrt n w_0. The same for e and a.
// 2 d (d + 1) multiply-adds for c and e, and 4 d^2 more with F; a Gram matrix takes d^3 / 2 once, and then
// 2 m^2 (plan.h).

template <class T>
class FactorRows {
  using V = Vec<T>;
  using L = Tile<T>;
  static constexpr std::int64_t N = V::size;

 public:
  FactorRows(Arena& arena, const Sampler<T>& sampler)
      : R(sampler.rows_of_factor()),
        S(sampler.source()),
        d(S.d),
        m(d + 1 + (S.bias ? 1 : 0)),
        deviation(static_cast<T>(S.noise_std)),
        root_n(static_cast<T>(std::sqrt(static_cast<double>(S.n)))) {
    for (Side* side : {&of_v, &of_a}) {
      side->u = arena.take<T>(d * N);
      side->before = arena.take<T>(S.feature_factor != nullptr ? d * N : 0);
      side->w = arena.take<T>((R.constant + R.rank) * N);
      side->x = arena.take<T>(d * N);
    }
  }

  // c [m, lanes] += G v and, with kE, e [m, lanes] += G a, for the sequences that were drawn last.
  template <bool kE>
  void apply(const T* v, const T* a, T* c, T* e) {
    start(v, of_v);
    if (kE) start(a, of_a);
    multiply<kE>();
    multiply_transposed<kE>();
    finish(v, of_v, c);
    if (kE) finish(a, of_a, e);
  }

 private:
  struct Side {
    T *u, *before;  // [d]; before F' or after R'
    T *w, *x;       // [constant + rank], [d]
  };

  // u, and in w what does not come from R_i . u.
  void start(const T* v, const Side& side) {
    const T* vx = v + (S.bias ? N : 0);
    const V vy = L::at(v, m - 1);
    T* u = R.factor != nullptr ? side.before : side.u;
    for (std::int64_t j = 0; j < d; ++j) L::put(u, j, fma(L::at(R.beta, j), vy, L::at(vx, j)));
    if (R.factor != nullptr) {
      product_column(d, d, NumbersAcross<T>{R.factor, d}, Along<T>{u, 0}, ToAlong<T>{side.u, 0});
    }
    const V noise = V::set(deviation) * vy;
    for (std::int64_t i = 0; i < R.constant + R.rank; ++i) {
      L::put(side.w, i, S.noise_std != 0 ? noise * L::at(R.noise, i) : V::zero());
    }
    if (R.constant != 0) L::put(side.w, 0, fma(V::set(root_n), L::at(v, 0), L::at(side.w, 0)));
  }

  // A sum for v and one for a.
  template <bool kE>
  struct Pair {
    V v, a;
    FASTLIN_INLINE static Pair at(const T* of_v, const T* of_a, std::int64_t i) {
      return {L::at(of_v, i), kE ? L::at(of_a, i) : V::zero()};
    }
    FASTLIN_INLINE void put(T* of_v, T* of_a, std::int64_t i) const {
      L::put(of_v, i, v);
      if (kE) L::put(of_a, i, a);
    }
    FASTLIN_INLINE void add(V entry, const Pair& other) {
      v = fma(entry, other.v, v);
      if (kE) a = fma(entry, other.a, a);
    }
  };

  // w += R u, two rows at a time: a multiply-add waits for the one before, and two share the loads of u.
  template <bool kE>
  void multiply() {
    using P = Pair<kE>;
    const auto u = [this](std::int64_t j) { return P::at(of_v.u, of_a.u, j); };
    const auto w = [this](std::int64_t i) { return P::at(of_v.w, of_a.w, i); };
    const T* row = R.normals;
    if (R.constant != 0) {
      P sum = w(0);
      for (std::int64_t j = 0; j < d; ++j) sum.add(V::load_once(row + j * N), u(j));
      sum.put(of_v.w, of_a.w, 0);
      row += d * N;
    }
    std::int64_t i = 0;
    for (; i + 2 <= R.rank; i += 2) {
      const std::int64_t right = d - 2 - i, at = R.constant + i;  // columns right of both diagonals
      const T *first = row + N, *second = first + right * N;
      P sum = w(at), next = w(at + 1);
      const P between = u(i + 1);
      sum.add(L::at(R.chi, i), u(i));
      sum.add(L::at(row, 0), between);
      next.add(L::at(R.chi, i + 1), between);
      for (std::int64_t k = 0; k < right; ++k) {
        const P uk = u(i + 2 + k);
        sum.add(L::at(first, k), uk);
        next.add(L::at(second, k), uk);
      }
      sum.put(of_v.w, of_a.w, at);
      next.put(of_v.w, of_a.w, at + 1);
      row = second + right * N;
    }
    if (i == R.rank) return;
    P sum = w(R.constant + i);
    sum.add(L::at(R.chi, i), u(i));
    for (std::int64_t k = 0; k < d - 1 - i; ++k) sum.add(V::load_once(row + k * N), u(i + 1 + k));
    sum.put(of_v.w, of_a.w, R.constant + i);
  }

  // x = R' w, two columns at a time.
  template <bool kE>
  void multiply_transposed() {
    using P = Pair<kE>;
    const auto w = [this](std::int64_t i) { return P::at(of_v.w, of_a.w, R.constant + i); };
    const T* below = R.normals + R.constant * d * N;
    for (std::int64_t j = 0; j < d; j += 2) {
      const bool two = j + 1 < d;
      P sum{V::zero(), V::zero()}, next = sum;
      if (R.constant != 0) {
        const P w0 = w(-1);
        sum.add(L::at(R.normals, j), w0);
        if (two) next.add(L::at(R.normals, j + 1), w0);
      }
      std::int64_t at = j - 1, i = 0;  // (0, j); the entry of row i + 1 is d - 2 - i further
      for (; i < std::min(j, R.rank); at += d - 2 - i, ++i) {
        const P wi = w(i);
        sum.add(L::at(below, at), wi);
        if (two) next.add(L::at(below, at + 1), wi);
      }
      if (j < R.rank) {
        const P wj = w(j);
        sum.add(L::at(R.chi, j), wj);
        if (two) next.add(L::at(below, at + 1), wj);
      }
      if (j + 1 < R.rank) next.add(L::at(R.chi, j + 1), w(j + 1));
      sum.put(of_v.x, of_a.x, j);
      if (two) next.put(of_v.x, of_a.x, j + 1);
    }
  }

  void finish(const T* v, const Side& side, T* c) {
    const T* x = side.x;
    if (R.factor != nullptr) {
      product_column(d, d, NumbersAlong<T>{R.factor, d}, Along<T>{x, 0}, ToAlong<T>{side.before, 0});
      x = side.before;
    }
    L::add(c + (S.bias ? N : 0), x, d);
    V label = L::at(c, m - 1) + L::dot(R.beta, x, d);
    if (S.noise_std != 0) {
      const V rest = V::set(deviation) * L::at(R.chi, d);
      label = fma(V::set(deviation), L::dot(R.noise, side.w, R.constant + R.rank), label);
      label = fma(rest * rest, L::at(v, m - 1), label);
    }
    L::put(c, m - 1, label);
    if (R.constant != 0) L::put(c, 0, fma(V::set(root_n), L::at(side.w, 0), L::at(c, 0)));
  }

  const typename Sampler<T>::Rows R;
  const Source& S;
  const std::int64_t d, m;
  const T deviation, root_n;
  Side of_v, of_a;
};
