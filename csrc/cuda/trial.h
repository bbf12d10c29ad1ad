// One trial of a tile, by one warp: predictions, errors, and all gradients.

template <class T, bool kStack>
class Trial {
  using V = Vec<T>;
  using L = Tile<T>;
  static constexpr std::int64_t N = V::size;

 public:
  FASTLIN_HD Trial(Arena& arena, const Call<T>& call)
      : call(call),
        P(call.P),
        out(call.out),
        at(call.at),
        m(call.P.m),
        reverses(kStack && (out.dA != nullptr || out.dC != nullptr || out.dp != nullptr || call.of_data())),
        layers(arena, call.P, call.out) {
    va = arena.take<T>(P.H * 2 * m * N);
    ce = arena.take<T>(P.H * 2 * m * N);
    h = arena.take<T>(P.h != nullptr ? m * N : 0);
    p = arena.take<T>(P.p != nullptr ? P.t * m * N : 0);
    sums = arena.take<T>(at.width * N);
  }

  // Starts the sums over a block of tiles.
  FASTLIN_HD void clear(std::int64_t block, std::int64_t r) {
    const std::int64_t square = P.H * m * m;
    if (out.dW != nullptr) zero(dW_of(block, r), square);
    if (out.dA != nullptr) zero(dA_of(block) + r * P.layers * square, P.layers * square);
    if (out.dC != nullptr) zero(dC_of(block) + r * P.layers * square, P.layers * square);
    sync_lanes();
  }

  FASTLIN_HD void run(const Context<T>& tile, int lanes, std::int64_t first, std::int64_t block,
                      std::int64_t r) {
    load_parameters(tile, r);
    const T *q = tile.q, *G = tile.G;
    if constexpr (kStack) {
      L::copy(tile.G, m * m, layers.first_G());
      L::copy(tile.q, m, layers.first_q());
      if (P.p != nullptr && P.t > 0) {
        T* to = layers.first_G();
        symmetric_product(m, P.t, Across<T>{p, m}, Across<T>{p, m}, ToAcross<T>{to, m, T(1), to});
      }
      layers.forward(r);
      q = layers.last_q(), G = layers.last_G();
    }
    const Head<T> head(P, out);
    V squares = V::zero();
    const V residual = head.error(predict(q, G, r), SequencesOf{*this, tile, q, r, lane() < lanes}, squares);
    if (at.squares >= 0) L::put(sums, at.squares, squares);
    if (call.gradients()) differentiate(tile, q, head, residual, block, r);
    if (at.width > 0) add_to_records(tile, lanes, first, block, r);
  }

 private:
  FASTLIN_HD T* v_of(std::int64_t head) const { return va + head * 2 * m * N; }
  FASTLIN_HD T* a_of(std::int64_t head) const { return v_of(head) + m * N; }
  FASTLIN_HD T* c_of(std::int64_t head) const { return ce + head * 2 * m * N; }
  FASTLIN_HD T* e_of(std::int64_t head) const { return c_of(head) + m * N; }
  FASTLIN_HD const T* W_of(std::int64_t r, std::int64_t head) const { return P.W + (r * P.H + head) * m * m; }

  // The block's sums over all tasks: dW [R, H, m, m], then dA and dC [R, L - 1, H, m, m].
  FASTLIN_HD double* dW_of(std::int64_t block, std::int64_t r) const {
    return call.partial + block * call.matrices + r * P.H * m * m;
  }
  FASTLIN_HD double* dA_of(std::int64_t block) const {
    return call.partial + block * call.matrices + (out.dW != nullptr ? P.R * P.H * m * m : 0);
  }
  FASTLIN_HD double* dC_of(std::int64_t block) const {
    return dA_of(block) + (out.dA != nullptr ? P.R * P.layers * P.H * m * m : 0);
  }

  FASTLIN_HD static void zero(double* numbers, std::int64_t count) {
    for (std::int64_t i = lane(); i < count; i += N) numbers[i] = 0;
  }

  FASTLIN_HD void load_parameters(const Context<T>& tile, std::int64_t r) {
    for (std::int64_t head = 0; head < P.H; ++head) {
      L::by_task(P.v + (r * P.H + head) * P.K * m, tile.task, m, v_of(head));
    }
    if (P.h != nullptr) L::by_task(P.h + r * P.K * m, tile.task, m, h);
    if (P.p != nullptr) L::by_task(P.p + r * P.K * P.t * m, tile.task, P.t * m, p);
  }

  // The sequences of a tile in trial r, for the head. Lanes that are not real have no sequence.
  struct SequencesOf {
    const Trial& all;
    const Context<T>& tile;
    const T* q;
    const std::int64_t r;
    const bool real;

    FASTLIN_HD V skipped() const { return L::dot(q, all.h, all.m); }
    FASTLIN_HD V target() const { return V::load(tile.y); }
    FASTLIN_HD V coefficient() const { return V::load(tile.coefficient); }
    FASTLIN_HD V slope() const { return real ? V::set(all.P.gy[index()]) : V::zero(); }
    FASTLIN_HD void store(V yhat) const {
      if (real) all.out.yhat[index()] = yhat.x;
    }
    FASTLIN_HD std::int64_t index() const { return r * all.P.B + tile.sequence[lane()]; }
  };

  // a = W' q, c = G v and e = G a of all heads; returns the sum of a . c. In one layer the prompt adds P v to
  // c, and its part of the gradients when the task is finished (core/records.h).
  FASTLIN_HD V predict(const T* q, const T* G, std::int64_t r) {
    V attended = V::zero();
    for (std::int64_t head = 0; head < P.H; ++head) {
      T *v = v_of(head), *c = c_of(head);
      product_column(m, m, NumbersAcross<T>{W_of(r, head), m}, Along<T>{q, 0}, ToAlong<T>{a_of(head), 0});
      L::zero(c, 2 * m);
      for (std::int64_t t = 0; !kStack && P.p != nullptr && t < P.t; ++t) {
        const T* token = p + t * m * N;
        L::add_scaled(L::dot(token, v, m), token, m, c);
      }
      product_parts<6, 2>(m, 2, m, Across<T>{G, m}, Along<T>{v, m}, ToAlong<T>{c, m, T(1), c}, false);
      attended = attended + L::dot(a_of(head), c, m);
    }
    return attended;
  }

  FASTLIN_HD void differentiate(const Context<T>& tile, const T* q, const Head<T>& head, V residual,
                                std::int64_t block, std::int64_t r) {
    const V g = head.scale * residual;
    for (std::int64_t i = 0; at.q >= 0 && i < m; ++i) L::put(sums, at.q + i, residual * L::at(q, i));
    for (std::int64_t head = 0; head < P.H; ++head) {
      T *c = c_of(head), *e = e_of(head);
      for (std::int64_t i = 0; i < m; ++i) L::put(c, i, g * L::at(c, i));
      for (std::int64_t i = 0; at.e >= 0 && i < m; ++i) L::put(sums, at.e + head * m + i, g * L::at(e, i));
      if (out.dW != nullptr) L::add_outer(q, c, m, dW_of(block, r) + head * m * m);
    }
    if (!reverses && !call.of_data()) return;
    T* qb = layers.qb;
    const V skipped = head.rho * residual;
    for (std::int64_t i = 0; i < m; ++i) {
      L::put(qb, i, P.h != nullptr ? skipped * L::at(h, i) : V::zero());
    }
    for (std::int64_t head = 0; head < P.H; ++head) {
      product_column(m, m, NumbersAlong<T>{W_of(r, head), m}, Along<T>{c_of(head), 0},
                     ToAlong<T>{qb, 0, T(1), qb});
    }
    if constexpr (kStack) reverse_layers(tile, g, block, r);
    if (out.dq != nullptr) L::add(tile.dq, qb, m);
    for (std::int64_t head = 0; !kStack && call.of_data() && head < P.H; ++head) {
      if (out.dx != nullptr) L::add_rank_two(g, a_of(head), v_of(head), m, tile.dG);
      if (out.dq != nullptr && P.see_query) L::add_pull(tile.q, a_of(head), v_of(head), m, g, tile.dq);
    }
  }

  FASTLIN_HD void reverse_layers(const Context<T>& tile, V g, std::int64_t block, std::int64_t r) {
    T* Gb = layers.Gb;
    L::zero(Gb, m * m);
    for (std::int64_t head = 0; head < P.H; ++head) L::add_rank_two(g, a_of(head), v_of(head), m, Gb);
    layers.clear_sums();
    layers.reverse(r);
    layers.add_sums(r, dA_of(block), dC_of(block));
    if (at.p >= 0) {
      product(m, P.t, m, Across<T>{Gb, m}, Along<T>{p, m}, ToAlong<T>{sums + at.p * N, m, T(2)});
    }
    if (out.dx != nullptr) L::add(tile.dG, Gb, m * m);
    if (out.dq != nullptr && P.see_query) {
      product_column(m, m, Across<T>{Gb, m}, Along<T>{tile.q, 0}, ToAlong<T>{tile.dq, 0, T(2), tile.dq});
    }
  }

  // Adds the sums over the lanes of each task to its record: that of an end of the block, or of the task.
  FASTLIN_HD void add_to_records(const Context<T>& tile, int lanes, std::int64_t first, std::int64_t block,
                                 std::int64_t r) {
    const std::int64_t begin = block * call.block_size;
    const std::int64_t end = begin + call.block_size < P.B ? begin + call.block_size : P.B;
    const std::int64_t first_task = call.task(begin), last_task = call.task(end - 1);
    sync_lanes();
    for (int from = 0; from < lanes;) {
      int to = from + 1;
      while (to < lanes && (*tile.starts >> to & 1u) == 0) ++to;
      const std::int64_t k = tile.task[from];
      double* record = k == first_task  ? call.end(block, false, r)
                       : k == last_task ? call.end(block, true, r)
                                        : call.record(k, r);
      const bool goes_on = from == 0 && first > begin && call.task(first - 1) == k;
      for (std::int64_t i = lane(); i < at.width; i += N) {
        const double sum = static_cast<double>(L::sum(sums + i * N, from, to));
        record[i] = goes_on ? record[i] + sum : sum;
      }
      from = to;
    }
    sync_lanes();
  }

  const Call<T>& call;
  const Problem<T>& P;
  const Results<T>& out;
  const Record& at;
  const std::int64_t m;
  const bool reverses;
  Layers<T> layers;
  T *va, *ce;  // [H, 2, m]: v and a; c and e, then g c
  T *h, *p;    // [m], [t, m] by the lanes' tasks
  T* sums;     // [width]
};
