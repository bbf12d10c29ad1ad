// Gradients of the data of a chunk, summed over trials: dq = qb (+ 2 Gb q with see_query), dG = Gb, dz = 2 Gb
// z. When one layer streams its tokens, Gb = g sym(a v') comes from few vectors: they are stored and applied
// to the tokens at the end, 4 n m multiply-adds each. Otherwise Gb is formed, and dz costs n m^2 once.

template <class T>
class DataGradients {
  using V = Vec<T>;
  using L = Tile<T>;
  static constexpr std::int64_t N = V::size;

 public:
  DataGradients(Arena& arena, const Plan<T>& plan, const Results<T>& out, const Chunk<T>& chunk)
      : P(plan.problem),
        out(out),
        chunk(chunk),
        m(plan.problem.m),
        forms_G(out.dx != nullptr && plan.path != Path::kStreamed),
        stores_pairs(out.dx != nullptr && plan.path == Path::kStreamed) {
    dq = arena.take<T>(out.dq != nullptr ? plan.tiles * m * N : 0);
    dG = arena.take<T>(forms_G ? plan.tiles * m * m * N : 0);
    pairs = arena.take<T>(stores_pairs ? plan.tiles * P.R * P.H * 2 * m * N : 0);
    tokens = arena.take<T>(out.dx != nullptr ? 2 * Tokens<T>::at_once(m) * m * N : 0);
  }

  void clear() {
    if (out.dq != nullptr) L::zero(dq, chunk.tiles * m);
    if (forms_G) L::zero(dG, chunk.tiles * m * m);
  }

  // Adds the part of a trial that does not go through G.
  void add_query(std::int64_t tile, const T* qb) { L::add(dq + tile * m * N, qb, m); }

  // Adds the part that goes through G, for one vector of one layer.
  void add_vectors(std::int64_t tile, std::int64_t vector, V g, const T* a, const T* v) {
    if (forms_G) L::add_rank_two(g, a, v, m, dG + tile * m * m * N);
    if (stores_pairs) {
      T* pair = pairs + (tile * P.R * P.H + vector) * 2 * m * N;
      for (std::int64_t j = 0; j < m; ++j) L::put(pair, j, g * L::at(a, j));
      std::copy_n(v, m * N, pair + m * N);
    }
    if (out.dq != nullptr && P.see_query) {
      L::add_pull(chunk.q + tile * m * N, a, v, m, g, dq + tile * m * N);
    }
  }

  // Adds the part that goes through G, for a trial of a stack.
  void add_matrix(std::int64_t tile, const T* Gb) {
    if (forms_G) L::add(dG + tile * m * m * N, Gb, m * m);
    if (out.dq == nullptr || !P.see_query) return;
    T* to = dq + tile * m * N;
    product(m, 1, m, Across<T>{Gb, m}, Along<T>{chunk.q + tile * m * N, 0}, ToAlong<T>{to, 0, T(2), to});
  }

  void store() {
    for (std::int64_t tile = 0; tile < chunk.tiles; ++tile) {
      T* rows[N];
      const int lanes = chunk.lanes(tile);
      if (out.dq != nullptr) {
        for (int l = 0; l < lanes; ++l) rows[l] = out.dq + chunk.sequence[tile * N + l] * m;
        L::store(dq + tile * m * N, m, rows, 0, lanes);
      }
      if (out.dx == nullptr) continue;
      const std::int64_t length = P.is_gram ? m * m : P.n * m;
      for (int l = 0; l < lanes; ++l) rows[l] = out.dx + chunk.sequence[tile * N + l] * length;
      if (P.is_gram) {
        L::store(dG + tile * m * m * N, m * m, rows, 0, lanes);
      } else {
        store_tokens(tile, rows, lanes);
      }
    }
  }

 private:
  void store_tokens(std::int64_t tile, T* const* rows, int lanes) {
    const Tokens<T> source{chunk.x + tile * N, nullptr, P.x_row, P.n, m};
    const std::int64_t step = Tokens<T>::at_once(m);
    T *z = tokens, *dz = tokens + step * m * N;
    for (std::int64_t first = 0; first < P.n; first += step) {
      const std::int64_t count = std::min(step, P.n - first);
      source.load(first, count, z);
      if (forms_G) {
        product(m, count, m, Across<T>{dG + tile * m * m * N, m}, Along<T>{z, m}, ToAlong<T>{dz, m, T(2)});
      } else {
        L::zero(dz, count * m);
        const T* pair = pairs + tile * P.R * P.H * 2 * m * N;
        for (std::int64_t i = 0; i < P.R * P.H; ++i, pair += 2 * m * N) {
          for (std::int64_t token = 0; token < count * m * N; token += m * N) {
            L::add_pull(z + token, pair, pair + m * N, m, V::set(T(1)), dz + token);
          }
        }
      }
      L::store(dz, count * m, rows, first * m, lanes);
    }
  }

  const Problem<T>& P;
  const Results<T>& out;
  const Chunk<T>& chunk;
  const std::int64_t m;
  const bool forms_G, stores_pairs;
  T* dq;      // [tiles, m]
  T* dG;      // [tiles, m, m]
  T* pairs;   // [tiles, R, H, 2, m]: g a, v
  T* tokens;  // [2, tokens at once, m]: z, dz
};
