// Losses, predictions and their gradients, CPU. A block of sequences in chunks, a chunk for all trials:
//   a = W' q     c = P v + G v     e = G a     yhat = scale sum_h a . c + rho q . h     g = scale r
//   dW = sum g q c'     dv = sum g e + P sum g a     dh = sum rho r q     qb = rho r h + g W c     Gb = g
//   sym(a v')
// with r = dloss/dyhat and the prompt P = sum_t p p'. In one layer P is the same for all sequences of a task:
// its part of c is made once a run, its part of the gradients when the task is finished (records.h). A stack
// has it in G. Lanes are sequences (tile-inl.h): 4 m^2 multiply-adds a trial and sequence, beside the
// context's.

template <class T>
class Worker {
  using V = Vec<T>;
  using L = Tile<T>;
  static constexpr std::int64_t N = V::size;

 public:
  Worker(Arena& arena, const Plan<T>& plan, const Results<T>& out)
      : plan(plan),
        P(plan.problem),
        out(out),
        at(plan.record),
        m(plan.problem.m),
        chunk(arena, plan),
        layers(arena, plan.problem, out) {
    const std::int64_t H = P.H, tiles = plan.tiles, vectors = tiles * H * m * N;
    stack = plan.path == Path::kStack;
    streamed = plan.path == Path::kStreamed;
    gradients = out.dW || out.dv || out.dh || out.dp || out.dA || out.dC || out.dx || out.dq;
    needs_qb = stack ? gradients : out.dq != nullptr;
    needs_dG = out.dx != nullptr && !streamed;
    G = arena.take<T>(streamed ? 0 : tiles * m * m * N);
    scratch = arena.take<T>(streamed ? Streamed<T>::scratch(P.n, m) : Gram<T>::scratch(P.n, m));
    v = arena.take<T>(H * m * N);
    h = arena.take<T>(P.h != nullptr ? m * N : 0);
    p = arena.take<T>(P.t * m * N);
    Pv = arena.take<T>(H * m * N);
    a = arena.take<T>(vectors);
    gc = arena.take<T>(vectors);
    last_q = arena.take<T>(stack ? tiles * m * N : 0);
    e = arena.take<T>(H * m * N);
    sums = arena.take<T>(at.width * N);
    mixed = arena.take<T>(at.width * N);
    dW = arena.take<T>(m * m * N);
    dq = arena.take<T>(out.dq != nullptr ? tiles * m * N : 0);
    dG = arena.take<T>(needs_dG ? tiles * m * m * N : 0);
    pairs = arena.take<T>(out.dx != nullptr && streamed ? tiles * P.R * H * 2 * m * N : 0);
    tokens = arena.take<T>(out.dx != nullptr ? 2 * Tokens<T>::group(m) * m * N : 0);
    records = arena.take<double>(tiles * N * P.R * at.width);
  }

  // The block's sums over all tasks go to `matrices`, those of its first and last task, if it shares them
  // with its neighbours, to `end_records` [2, R, width].
  void block(std::int64_t index, double* matrices, double* end_records, Ends& ends, Stop& stop, int thread) {
    const std::int64_t begin = index * plan.block_size;
    const std::int64_t end = std::min(P.B, begin + plan.block_size);
    block_dW = matrices;
    block_dA = block_dW + (out.dW != nullptr ? P.R * P.H * m * m : 0);
    block_dC = block_dA + (out.dA != nullptr ? P.R * P.layers * P.H * m * m : 0);
    std::fill_n(matrices, plan.matrices, 0.0);
    const std::int64_t size = P.R * at.width, step = plan.tiles * N;
    std::int64_t open = -1;  // task whose record, the first, goes on in the next chunk
    for (std::int64_t first = begin; first < end; first += step) {
      if (stop.now(thread)) return;
      chunk.take(first, std::min(end, first + step));
      if (open >= 0 && open != chunk.run_task[0]) {
        close(begin, end, open, records, end_records, ends);
        open = -1;
      }
      std::fill(records + (open >= 0 ? size : 0), records + chunk.runs * size, 0.0);
      work();
      for (std::int64_t i = 0; i + 1 < chunk.runs; ++i)
        close(begin, end, chunk.run_task[i], records + i * size, end_records, ends);
      open = chunk.run_task[chunk.runs - 1];
      if (chunk.runs > 1) std::copy_n(records + (chunk.runs - 1) * size, size, records);
    }
    if (open >= 0) close(begin, end, open, records, end_records, ends);
  }

 private:
  // Finishes a task that lies in this block alone; else its record waits for those of the neighbours.
  void close(std::int64_t begin, std::int64_t end, std::int64_t task, double* record, double* end_records,
             Ends& ends) {
    const bool starts = plan.start[task] >= begin, stops = plan.start[task + 1] <= end;
    if (starts && stops) {
      finish_task(plan, out, task, record);
      return;
    }
    const std::int64_t size = P.R * at.width;
    (starts ? ends.last : ends.first) = task;
    std::copy_n(record, size, end_records + (starts ? size : 0));
  }

  void work() {
    if (!streamed) {
      for (std::int64_t tile = 0; tile < chunk.tiles; ++tile) form_gram(tile);
    }
    if (out.dq != nullptr) L::zero(dq, chunk.tiles * m);
    if (needs_dG) L::zero(dG, chunk.tiles * m * m);
    for (std::int64_t r = 0; r < P.R; ++r) trial(r);
    if (out.dq != nullptr || out.dx != nullptr) {
      for (std::int64_t tile = 0; tile < chunk.tiles; ++tile) store_data_gradients(tile);
    }
  }

  Tokens<T> tokens_of(std::int64_t tile) const { return {chunk.x + tile * N, P.x_row, P.n, m}; }
  T* gram_of(std::int64_t tile) { return G + tile * m * m * N; }

  void form_gram(std::int64_t tile) {
    if (P.is_gram) {
      Gram<T>::of_matrices(chunk.x + tile * N, P.x_row, m, gram_of(tile));
    } else {
      Gram<T>::of_tokens(tokens_of(tile), gram_of(tile), scratch);
    }
    if (P.see_query) Gram<T>::add_outer(chunk.q + tile * m * N, 1, m, gram_of(tile));
  }

  void trial(std::int64_t r) {
    if (stack) {
      layers.clear_sums();
    } else {
      project(r, 0, chunk.tiles, chunk.q);
    }
    std::int64_t run = -1;  // whose sums are in `sums`
    for (std::int64_t tile = 0; tile < chunk.tiles; ++tile) {
      if (chunk.changed[tile]) load_parameters(r, tile);
      if (stack) {
        run_layers(r, tile);
        project(r, tile, 1, last_q + tile * m * N);
      }
      if (!chunk.whole[tile]) {
        L::zero(mixed, at.width);
        head(r, tile, mixed);
        scatter(r, tile);
        continue;
      }
      if (chunk.run[tile * N] != run) {
        flush(r, run);
        run = chunk.run[tile * N];
        L::zero(sums, at.width);
      }
      head(r, tile, sums);
    }
    flush(r, run);
    if (out.dW != nullptr) add_dW(r);
    if (stack && gradients) layers.add_sums(r, block_dA, block_dC);
  }

  // a [H, tiles, m] = W' q for tiles first, first + 1, ... whose queries are at q.
  void project(std::int64_t r, std::int64_t first, std::int64_t tiles, const T* q) {
    for (std::int64_t hd = 0; hd < P.H; ++hd) {
      const T* W = P.W + (r * P.H + hd) * m * m;
      T* to = a + (hd * plan.tiles + first) * m * N;
      product(m, tiles, m, Numbers<T>{W, m, 1}, Lanes<T>{q, 1, m}, To<T>{to, 1, m});
    }
  }

  // What the tasks of a tile's lanes say: v, h, p, and in one layer the prompt's part of c.
  void load_parameters(std::int64_t r, std::int64_t tile) {
    for (std::int64_t hd = 0; hd < P.H; ++hd) {
      chunk.by_task(tile, P.v + (r * P.H + hd) * P.K * m, m, v + hd * m * N);
    }
    if (P.h != nullptr) chunk.by_task(tile, P.h + r * P.K * m, m, h);
    if (P.p != nullptr) chunk.by_task(tile, P.p + r * P.K * P.t * m, P.t * m, p);
    L::zero(Pv, P.H * m);
    if (stack) return;
    for (std::int64_t hd = 0; hd < P.H; ++hd) {
      for (std::int64_t t = 0; P.p != nullptr && t < P.t; ++t) {
        Streamed<T>::template add_tokens<1, false>(p + t * m * N, m, v + hd * m * N, nullptr, Pv + hd * m * N,
                                                   nullptr);
      }
    }
  }

  void run_layers(std::int64_t r, std::int64_t tile) {
    std::copy_n(gram_of(tile), m * m * N, layers.first_G());
    std::copy_n(chunk.q + tile * m * N, m * N, layers.first_q());
    if (P.p != nullptr) Gram<T>::add_outer(p, P.t, m, layers.first_G());
    layers.forward(r);
    std::copy_n(layers.last_q(), m * N, last_q + tile * m * N);
  }

  const T* query(std::int64_t tile) const { return (stack ? last_q : chunk.q) + tile * m * N; }
  T* vector(T* all, std::int64_t hd, std::int64_t tile) { return all + (hd * plan.tiles + tile) * m * N; }

  // c and, when heads are trained, e of one attention head. Returns a . c.
  template <bool kE>
  V apply(std::int64_t hd, std::int64_t tile, T* c, T* e_out) {
    const T *vh = v + hd * m * N, *ah = vector(a, hd, tile), *base = Pv + hd * m * N;
    if (!streamed) {
      return Gram<T>::template apply<kE>(stack ? layers.last_G() : gram_of(tile), m, vh, ah, base, c, e_out);
    }
    std::copy_n(base, m * N, c);
    if (kE) L::zero(e_out, m);
    if (P.see_query) Streamed<T>::template add_tokens<1, kE>(chunk.q + tile * m * N, m, vh, ah, c, e_out);
    Streamed<T>::template apply<kE>(tokens_of(tile), 0, P.n, vh, ah, c, e_out, scratch);
    return dot(ah, c, m);
  }

  static V dot(const T* x, const T* y, std::int64_t count) {
    V even = V::zero(), odd = V::zero();
    std::int64_t i = 0;
    for (; i + 2 <= count; i += 2) {
      even = fma(L::at(x, i), L::at(y, i), even);
      odd = fma(L::at(x, i + 1), L::at(y, i + 1), odd);
    }
    if (i < count) even = fma(L::at(x, i), L::at(y, i), even);
    return even + odd;
  }

  // to += factor * x.
  static void add_scaled(V factor, const T* x, std::int64_t count, T* to) {
    for (std::int64_t i = 0; i < count; ++i) L::put(to, i, fma(factor, L::at(x, i), L::at(to, i)));
  }

  // The last layer of one tile: prediction, error, and all gradients but dW; sums per task are added to
  // `sum`.
  void head(std::int64_t r, std::int64_t tile, T* sum) {
    const V scale = V::set(static_cast<T>(P.scale)), rho = V::set(static_cast<T>(P.last_skip));
    V attended = V::zero();
    for (std::int64_t hd = 0; hd < P.H; ++hd) {
      T* c = vector(gc, hd, tile);
      T* eh = e + hd * m * N;
      attended = attended + (at.e >= 0 ? apply<true>(hd, tile, c, eh) : apply<false>(hd, tile, c, eh));
    }
    V yhat = scale * attended;
    if (P.h != nullptr) yhat = fma(rho, dot(query(tile), h, m), yhat);
    if (out.yhat != nullptr) scatter_yhat(r, tile, yhat);
    const V residual = error(r, tile, yhat, sum);
    if (!gradients) return;
    const V g = scale * residual;
    if (at.q >= 0) add_scaled(rho * residual, query(tile), m, sum + at.q * N);
    for (std::int64_t hd = 0; hd < P.H; ++hd) {
      T* c = vector(gc, hd, tile);
      for (std::int64_t j = 0; j < m; ++j) L::put(c, j, g * L::at(c, j));
      if (at.e >= 0) add_scaled(g, e + hd * m * N, m, sum + (at.e + hd * m) * N);
      if (at.a >= 0) add_scaled(g, vector(a, hd, tile), m, sum + (at.a + hd * m) * N);
    }
    if (needs_qb) make_qb(r, tile, rho * residual);
    if (stack) {
      reverse_layers(r, tile, g, sum);
    } else if (out.dx != nullptr) {
      keep_pairs(r, tile, g);
    }
    if (out.dq != nullptr) pull_query(tile, g);
  }

  // r = dloss/dyhat of the lanes; squared errors go to the sums.
  V error(std::int64_t r, std::int64_t tile, V yhat, T* sum) {
    if (P.y != nullptr) {
      const V difference = yhat - L::at(chunk.y, tile);
      const V square = L::at(chunk.active, tile) * difference * difference;
      L::put(sum, at.squares, L::at(sum, at.squares) + square);
      return (difference + difference) * L::at(chunk.coefficient, tile);
    }
    if (P.gy == nullptr) return V::zero();
    T lanes[N];
    for (int l = 0; l < N; ++l) {
      lanes[l] = l < chunk.lanes(tile) ? P.gy[r * P.B + chunk.sequence[tile * N + l]] : T(0);
    }
    return V::load(lanes);
  }

  void scatter_yhat(std::int64_t r, std::int64_t tile, V yhat) {
    T lanes[N];
    yhat.store(lanes);
    for (int l = 0; l < chunk.lanes(tile); ++l) out.yhat[r * P.B + chunk.sequence[tile * N + l]] = lanes[l];
  }

  void make_qb(std::int64_t r, std::int64_t tile, V skipped) {
    T* qb = layers.qb;
    if (P.h != nullptr) {
      for (std::int64_t i = 0; i < m; ++i) L::put(qb, i, skipped * L::at(h, i));
    } else {
      L::zero(qb, m);
    }
    for (std::int64_t hd = 0; hd < P.H; ++hd) {
      const T* W = P.W + (r * P.H + hd) * m * m;
      product(m, 1, m, Numbers<T>{W, 1, m}, Lanes<T>{vector(gc, hd, tile), 1, 0},
              To<T>{qb, 1, 0, T(1), true});
    }
  }

  // target [m, m] += g sym(a v') of one attention head.
  void add_rank_two(std::int64_t hd, std::int64_t tile, V g, T* target) {
    const T *ah = vector(a, hd, tile), *vh = v + hd * m * N;
    const V half = V::set(T(0.5)) * g;
    for (std::int64_t i = 0; i < m; ++i) {
      const V ai = half * L::at(ah, i), vi = half * L::at(vh, i);
      for (std::int64_t j = 0; j < m; ++j) {
        const V value = fma(ai, L::at(vh, j), fma(vi, L::at(ah, j), L::at(target, i * m + j)));
        L::put(target, i * m + j, value);
      }
    }
  }

  void reverse_layers(std::int64_t r, std::int64_t tile, V g, T* sum) {
    L::zero(layers.Gb, m * m);
    for (std::int64_t hd = 0; hd < P.H; ++hd) add_rank_two(hd, tile, g, layers.Gb);
    layers.reverse(r);
    if (at.p >= 0) {
      product(m, P.t, m, Lanes<T>{layers.Gb, m, 1}, Lanes<T>{p, 1, m},
              To<T>{sum + at.p * N, 1, m, T(2), true});
    }
    if (needs_dG) L::add(dG + tile * m * m * N, layers.Gb, m * m);
  }

  // For the gradient of the tokens: g a and v of this trial, or their part of dG.
  void keep_pairs(std::int64_t r, std::int64_t tile, V g) {
    for (std::int64_t hd = 0; hd < P.H; ++hd) {
      if (needs_dG) {
        add_rank_two(hd, tile, g, dG + tile * m * m * N);
        continue;
      }
      T* pair = pairs + ((tile * P.R + r) * P.H + hd) * 2 * m * N;
      const T* ah = vector(a, hd, tile);
      for (std::int64_t j = 0; j < m; ++j) L::put(pair, j, g * L::at(ah, j));
      std::copy_n(v + hd * m * N, m * N, pair + m * N);
    }
  }

  // dq += qb, and 2 Gb q when the query is among the keys.
  void pull_query(std::int64_t tile, V g) {
    T* to = dq + tile * m * N;
    L::add(to, layers.qb, m);
    if (!P.see_query) return;
    const T* q = chunk.q + tile * m * N;
    if (stack) {
      product(m, 1, m, Lanes<T>{layers.Gb, m, 1}, Lanes<T>{q, 1, 0}, To<T>{to, 1, 0, T(2), true});
      return;
    }
    for (std::int64_t hd = 0; hd < P.H; ++hd) {
      const T *ah = vector(a, hd, tile), *vh = v + hd * m * N;
      const V with_v = g * dot(q, vh, m), with_a = g * dot(q, ah, m);
      add_scaled(with_v, ah, m, to);
      add_scaled(with_a, vh, m, to);
    }
  }

  void flush(std::int64_t r, std::int64_t run) {
    if (run >= 0) L::add_sums(sums, at.width, records + (run * P.R + r) * at.width);
  }

  // Adds the lanes of a tile of several tasks to their records, one by one.
  void scatter(std::int64_t r, std::int64_t tile) {
    for (int l = 0; l < chunk.lanes(tile); ++l) {
      double* record = records + (chunk.run[tile * N + l] * P.R + r) * at.width;
      for (std::int64_t i = 0; i < at.width; ++i) record[i] += static_cast<double>(mixed[i * N + l]);
    }
  }

  void add_dW(std::int64_t r) {
    const T* q = query(0);
    for (std::int64_t hd = 0; hd < P.H; ++hd) {
      product(m, m, chunk.tiles, Lanes<T>{q, m, 1}, Lanes<T>{vector(gc, hd, 0), m, 1}, To<T>{dW, m, 1});
      L::add_sums(dW, m * m, block_dW + (r * P.H + hd) * m * m);
    }
  }

  void store_data_gradients(std::int64_t tile) {
    T* rows[N];
    const int lanes = chunk.lanes(tile);
    if (out.dq != nullptr) {
      for (int l = 0; l < lanes; ++l) rows[l] = out.dq + chunk.sequence[tile * N + l] * m;
      L::store(dq + tile * m * N, m, rows, 0, lanes);
    }
    if (out.dx == nullptr) return;
    const std::int64_t length = P.is_gram ? m * m : P.n * m;
    for (int l = 0; l < lanes; ++l) rows[l] = out.dx + chunk.sequence[tile * N + l] * length;
    if (P.is_gram) {
      L::store(dG + tile * m * m * N, m * m, rows, 0, lanes);
      return;
    }
    const std::int64_t group = Tokens<T>::group(m);
    T *z = tokens, *dz = tokens + group * m * N;
    for (std::int64_t first = 0; first < P.n; first += group) {
      const std::int64_t count = std::min(group, P.n - first);
      tokens_of(tile).load(first, count, z);
      if (needs_dG) {
        const T* Gb = dG + tile * m * m * N;
        product(m, count, m, Lanes<T>{Gb, m, 1}, Lanes<T>{z, 1, m}, To<T>{dz, 1, m, T(2)});
      } else {
        L::zero(dz, count * m);
        const T* pair = pairs + tile * P.R * P.H * 2 * m * N;
        for (std::int64_t i = 0; i < P.R * P.H; ++i, pair += 2 * m * N) {
          for (std::int64_t token = 0; token < count; ++token) {
            const T* zi = z + token * m * N;
            const V with_a = dot(zi, pair, m), with_v = dot(zi, pair + m * N, m);
            add_scaled(with_v, pair, m, dz + token * m * N);
            add_scaled(with_a, pair + m * N, m, dz + token * m * N);
          }
        }
      }
      L::store(dz, count * m, rows, first * m, lanes);
    }
  }

  const Plan<T>& plan;
  const Problem<T>& P;
  const Results<T>& out;
  const Record& at;
  const std::int64_t m;
  Chunk<T> chunk;
  Layers<T> layers;
  bool stack, streamed, gradients, needs_qb, needs_dG;
  T *G, *scratch, *v, *h, *p, *Pv, *a, *gc, *last_q, *e, *sums, *mixed, *dW, *dq, *dG, *pairs, *tokens;
  double* records;  // [runs of a chunk, R, width]
  double *block_dW = nullptr, *block_dA = nullptr, *block_dC = nullptr;
};
