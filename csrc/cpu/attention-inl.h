// Losses, predictions and their gradients, CPU. A block of sequences is cut into chunks; all trials run on a
// chunk:
//   a = W' q     c = P v + G v     yhat = scale sum_h a . c + rho q . h     g = scale r
//   dW = sum g q c'     dv = sum G (g a) + P sum g a     dh = sum rho r q
//   qb = rho r h + g W c     Gb = g sym(a v')
// with r = dloss/dyhat and the prompt P = sum_t p p'. In one layer P is the same for all sequences of a task:
// its part of c is computed once a run, its part of the gradients when the task is finished, from the sum of
// r q, since a = W' q (records.h). A stack adds it to G. Lanes are sequences (tile-inl.h): 4 m^2
// multiply-adds for each trial and sequence, besides those of the context.
//
// Trials run in groups, a few tiles at a time, so that the whole group uses a Gram matrix while it is in L1.
// The vectors of a group are the heads of its trials, one after the other.

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
        stack(plan.path == Path::kStack),
        streamed(plan.path == Path::kStreamed),
        gradients(out.dW || out.dv || out.dh || out.dp || out.dA || out.dC || out.dx || out.dq),
        reverses(stack && (out.dA || out.dC || out.dp || out.dx || out.dq)),
        needs_qb(reverses || out.dq != nullptr),
        query_entries(stack || plan.problem.source == nullptr ? plan.problem.m : plan.problem.m - 1),
        chunk(arena, plan),
        layers(arena, plan.problem, out),
        data(arena, plan, out, chunk),
        lane_trials(arena, plan, out, chunk) {
    const std::int64_t tiles = plan.tiles, group = plan.trials_at_once, most = group * P.H;
    G = arena.take<T>(streamed ? 0 : tiles * m * m * N);
    const std::int64_t n = P.source != nullptr ? 0 : P.n;
    scratch = arena.take<T>(streamed ? Streamed<T>::scratch(n, m) : Gram<T>::scratch(n, m));
    v = arena.take<T>(most * m * N);
    a = arena.take<T>(plan.tiles_at_once * most * m * N);
    base = arena.take<T>(most * m * N);
    c = arena.take<T>(most * m * N);
    e = arena.take<T>(most * m * N);
    h = arena.take<T>(P.h != nullptr ? group * m * N : 0);
    p = arena.take<T>(group * P.t * m * N);
    gc = arena.take<T>(tiles * most * m * N);
    last_q = arena.take<T>(stack ? tiles * m * N : 0);
    residuals = arena.take<T>(tiles * group * N);
    sums = arena.take<T>(group * at.width * N);
    dW_rows = std::max<std::int64_t>(4, (16 << 10) / (m * N * static_cast<std::int64_t>(sizeof(T))) / 4 * 4);
    dW = arena.take<T>(std::min(dW_rows, m) * m * N);
    records = arena.take<double>(tiles * N * P.R * at.width);
    if (P.source == nullptr) return;
    sampler.emplace(arena, *P.source);
    if (streamed) factor.emplace(arena, *sampler);
  }

  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Writes the block's sums over all tasks to `matrices`, and the records of its first and last task, if it
  // shares them with its neighbours, to `end_records` [2, R, width].
  void block(std::int64_t index, double* matrices, double* end_records, BoundaryTasks& shared_tasks,
             Stop& stop, int thread) {
    const std::int64_t begin = index * plan.block_size;
    const std::int64_t end = std::min(P.B, begin + plan.block_size);
    block_dW = matrices;
    block_dA = block_dW + (out.dW != nullptr ? P.R * P.H * m * m : 0);
    block_dC = block_dA + (out.dA != nullptr ? P.R * P.layers * P.H * m * m : 0);
    std::fill_n(matrices, plan.matrices, 0.0);
    const std::int64_t size = P.R * at.width, step = plan.tiles * N;
    std::int64_t open = -1;  // task of the first record, which continues in the next chunk
    for (std::int64_t first = begin; first < end; first += step) {
      chunk.load(first, std::min(end, first + step));
      if (open >= 0 && open != chunk.run_task[0]) {
        close_task(begin, end, open, records, end_records, shared_tasks);
        open = -1;
      }
      std::fill(records + (open >= 0 ? size : 0), records + chunk.runs * size, 0.0);
      if (!run_chunk(stop, thread)) return;
      for (std::int64_t i = 0; i + 1 < chunk.runs; ++i) {
        close_task(begin, end, chunk.run_task[i], records + i * size, end_records, shared_tasks);
      }
      open = chunk.run_task[chunk.runs - 1];
      if (chunk.runs > 1) std::copy_n(records + (chunk.runs - 1) * size, size, records);
    }
    if (open >= 0) close_task(begin, end, open, records, end_records, shared_tasks);
  }

 private:
  // Finishes a task that lies only in this block; otherwise stores its record for join_boundary_records.
  void close_task(std::int64_t begin, std::int64_t end, std::int64_t task, double* record,
                  double* end_records, BoundaryTasks& shared_tasks) {
    const bool starts = plan.by_task.start[task] >= begin, stops = plan.by_task.start[task + 1] <= end;
    if (starts && stops) {
      finish_task(plan, out, task, record);
      return;
    }
    const std::int64_t size = P.R * at.width;
    (starts ? shared_tasks.last : shared_tasks.first) = task;
    std::copy_n(record, size, end_records + (starts ? size : 0));
  }

  // Returns false if the call must stop, which it polls every few tiles.
  bool run_chunk(Stop& stop, int thread) {
    for (std::int64_t tile = 0; !streamed && tile < chunk.tiles; ++tile) {
      if (stop.requested(thread)) return false;
      form_gram(tile);
      if (plan.lane_trials > 0) lane_trials.load_tile(tile, gram_of(tile));
    }
    if (plan.lane_trials > 0 && !lane_trials.run(records, block_dW, stop, thread)) return false;
    data.clear();
    for (first_trial = plan.lane_trials; first_trial < P.R; first_trial += plan.trials_at_once) {
      trials = std::min(plan.trials_at_once, P.R - first_trial);
      vectors = trials * P.H;
      if (!run_trials(stop, thread)) return false;
    }
    data.store();
    return true;
  }

  Tokens<T> tokens_of(std::int64_t tile) const {
    return {chunk.x + tile * N, chunk.x + (tile + 1) * N, P.x_row, P.n, m};
  }
  T* gram_of(std::int64_t tile) { return G + tile * m * m * N; }

  void draw_question(std::int64_t tile) {
    T *q = chunk.q + tile * m * N, *y = chunk.y + tile * N;
    sampler->question(chunk.sequence + tile * N, chunk.task + tile * N, chunk.whole[tile], q, y);
    chunk.clear_idle(tile, m, q);
    chunk.clear_idle(tile, 1, y);
  }

  void form_gram(std::int64_t tile) {
    if (P.source != nullptr) {
      draw_question(tile);
      sampler->gram(gram_of(tile));
    } else if (P.is_gram) {
      Gram<T>::of_matrices(chunk.x + tile * N, P.x_row, m, gram_of(tile));
    } else {
      Gram<T>::of_tokens(tokens_of(tile), gram_of(tile), scratch);
    }
    chunk.clear_idle(tile, m * m, gram_of(tile));
    if (P.see_query) Gram<T>::add_outer(chunk.q + tile * m * N, 1, m, gram_of(tile));
  }

  bool run_trials(Stop& stop, int thread) {
    if (reverses) layers.clear_sums();
    std::int64_t range = 0;  // first tile of those whose lanes have the tasks of the sums
    for (std::int64_t part = 0; part < chunk.tiles; part += plan.tiles_at_once) {
      if (stop.requested(thread)) return false;
      const std::int64_t end = std::min(chunk.tiles, part + plan.tiles_at_once);
      first_tile = part;
      if (factor) {
        draw_question(part);
        sampler->draw_rows();
      }
      if (!stack) project(part, end - part, chunk.q + part * m * N);
      for (std::int64_t tile = part; tile < end; ++tile) {
        if (chunk.changed[tile]) {
          if (tile > 0) add_to_records(range, tile);
          range = tile;
          L::zero(sums, trials * at.width);
          load_parameters(tile);
        }
        if (stack) {
          run_layers(tile);
          project(tile, 1, last_q + tile * m * N);
        }
        head(tile);
      }
    }
    add_to_records(range, chunk.tiles);
    if (out.dW != nullptr) add_dW();
    if (reverses) layers.add_sums(first_trial, block_dA, block_dC);
    return true;
  }

  T* v_of(std::int64_t vector) { return v + vector * m * N; }
  T* a_of(std::int64_t tile, std::int64_t vector) {
    return a + ((tile - first_tile) * vectors + vector) * m * N;
  }
  T* gc_of(std::int64_t tile, std::int64_t vector) { return gc + (tile * vectors + vector) * m * N; }
  const T* query(std::int64_t tile) const { return (stack ? last_q : chunk.q) + tile * m * N; }

  // a = W' q of `tiles` tiles, starting at `tile`.
  void project(std::int64_t tile, std::int64_t tiles, const T* q) {
    for (std::int64_t i = 0; i < vectors; ++i) {
      const T* W = P.W + (first_trial * P.H + i) * m * m;
      product(m, tiles, query_entries, NumbersAcross<T>{W, m}, Along<T>{q, m},
              ToAlong<T>{a_of(tile, i), vectors * m});
    }
  }

  // Loads v, h, p of the tasks of a tile's lanes, and in one layer the prompt's part of c. They serve the
  // next tiles too, until the tasks change.
  void load_parameters(std::int64_t tile) {
    const std::int64_t r = first_trial;
    for (std::int64_t i = 0; i < trials; ++i) {
      if (P.h != nullptr) chunk.by_task(tile, P.h + (r + i) * P.K * m, m, h + i * m * N);
      if (P.p != nullptr) {
        chunk.by_task(tile, P.p + (r + i) * P.K * P.t * m, P.t * m, p + i * P.t * m * N);
      }
    }
    L::zero(base, vectors * m);
    for (std::int64_t i = 0; i < vectors; ++i) {
      if (P.shares_v) {
        for (std::int64_t j = 0; j < m; ++j) L::put(v_of(i), j, V::broadcast(P.v_of(r * P.H + i, 0) + j));
      } else {
        chunk.by_task(tile, P.v_of(r * P.H + i, 0), m, v_of(i));
      }
      for (std::int64_t t = 0; !stack && P.p != nullptr && t < P.t; ++t) {
        const T* token = p + (i / P.H * P.t + t) * m * N;
        Streamed<T>::template add_tokens<1, false>(token, m, v_of(i), nullptr, base + i * m * N, nullptr);
      }
    }
  }

  void run_layers(std::int64_t tile) {
    std::copy_n(gram_of(tile), m * m * N, layers.first_G());
    std::copy_n(chunk.q + tile * m * N, m * N, layers.first_q());
    if (P.p != nullptr) Gram<T>::add_outer(p, P.t, m, layers.first_G());
    layers.forward(first_trial);
    std::copy_n(layers.last_q(), m * N, last_q + tile * m * N);
  }

  const T* matrix_of(std::int64_t tile) { return stack ? layers.last_G() : gram_of(tile); }

  // c of all vectors, and e = G a if tokens are streamed and dv is wanted.
  void apply(std::int64_t tile) {
    if (!streamed) {
      product(m, vectors, m, Across<T>{matrix_of(tile), m}, Along<T>{v, m}, ToAlong<T>{c, m, T(1), base});
      return;
    }
    std::copy_n(base, vectors * m * N, c);
    if (at.e >= 0) L::zero(e, vectors * m);
    for (std::int64_t i = 0; i < vectors; ++i) {
      if (at.e >= 0) {
        stream<true>(tile, i);
      } else {
        stream<false>(tile, i);
      }
    }
    chunk.clear_idle(tile, vectors * m, c);
    if (at.e >= 0) chunk.clear_idle(tile, vectors * m, e);
  }

  template <bool kE>
  void stream(std::int64_t tile, std::int64_t i) {
    const T *vi = v_of(i), *ai = a_of(tile, i);
    T *ci = c + i * m * N, *ei = e + i * m * N;
    if (P.see_query) Streamed<T>::template add_tokens<1, kE>(chunk.q + tile * m * N, m, vi, ai, ci, ei);
    if (factor) {
      factor->template apply<kE>(vi, ai, ci, ei);
      return;
    }
    Streamed<T>::template apply<kE>(tokens_of(tile), 0, P.n, vi, ai, ci, ei, scratch);
  }

  // The last layer of one tile: predictions, errors, and all gradients except dW.
  void head(std::int64_t tile) {
    const V scale = V::set(static_cast<T>(P.scale)), rho = V::set(static_cast<T>(P.last_skip));
    apply(tile);
    for (std::int64_t i = 0; i < trials; ++i) {
      V attended = V::zero();
      for (std::int64_t vector = i * P.H; vector < (i + 1) * P.H; ++vector) {
        attended = attended + L::dot(a_of(tile, vector), c + vector * m * N, m);
      }
      V yhat = scale * attended;
      if (P.h != nullptr) yhat = fma(rho, L::dot(query(tile), h + i * m * N, m), yhat);
      if (out.yhat != nullptr) scatter_yhat(first_trial + i, tile, yhat);
      L::put(residuals, tile * trials + i, error(first_trial + i, tile, yhat, sums + i * at.width * N));
    }
    if (!gradients) return;
    if (at.e < 0) {
      scale_vectors<Heads::kNone>(tile, scale);
    } else if (streamed) {
      scale_vectors<Heads::kStreamed>(tile, scale);
    } else {
      scale_vectors<Heads::kFormed>(tile, scale);
      add_to_heads(tile);
    }
    if (!needs_qb && out.dx == nullptr) return;
    for (std::int64_t i = 0; i < trials; ++i) {
      const V residual = L::at(residuals, tile * trials + i), g = scale * residual;
      T* sum = sums + i * at.width * N;
      if (needs_qb) make_qb(i, tile, rho * residual);
      if (reverses) reverse_layers(tile, g, sum);
      if (out.dq != nullptr) data.add_query(tile, layers.qb);
      for (std::int64_t vector = i * P.H; !stack && vector < (i + 1) * P.H; ++vector) {
        data.add_vectors(tile, first_trial * P.H + vector, g, a_of(tile, vector), v_of(vector));
      }
    }
  }

  // Where dv comes from: it is not wanted, from e, or from G and g a.
  enum class Heads { kNone, kStreamed, kFormed };

  // g c of all vectors, and the sums of g e, or g a in place of e. Works on copies of the members: the
  // compiler must assume that a store of a vector changes them.
  template <Heads kHeads>
  void scale_vectors(std::int64_t tile, V scale) {
    const std::int64_t count = m, heads = P.H, all = trials, width = at.width * N, length = m * N;
    const std::int64_t e_sum = at.e * N;
    const T *from = c, *query = a_of(tile, 0), *residual = residuals + tile * all * N;
    T *scaled = gc_of(tile, 0), *ei = e, *sum = sums;
    for (std::int64_t i = 0; i < all; ++i, sum += width) {
      const V g = scale * L::at(residual, i);
      for (std::int64_t k = 0; k < heads; ++k) {
        T* to = sum + e_sum + k * length;
        for (std::int64_t j = 0; j < count; ++j) {
          L::put(scaled, j, g * L::at(from, j));
          if (kHeads == Heads::kStreamed) L::put(to, j, fma(g, L::at(ei, j), L::at(to, j)));
          if (kHeads == Heads::kFormed) L::put(ei, j, g * L::at(query, j));
        }
        from += length, query += length, scaled += length, ei += length;
      }
    }
  }

  // Adds to the sums of G (g a), from g a in e.
  void add_to_heads(std::int64_t tile) {
    const Across<T> G{matrix_of(tile), m};
    T* sum = sums + at.e * N;
    if (P.H == 1) {
      product(m, trials, m, G, Along<T>{e, m}, ToAlong<T>{sum, at.width, T(1), sum});
      return;
    }
    for (std::int64_t i = 0; i < trials; ++i, sum += at.width * N) {
      product(m, P.H, m, G, Along<T>{e + i * P.H * m * N, m}, ToAlong<T>{sum, m, T(1), sum});
    }
  }

  // Returns r = dloss/dyhat of the lanes, and adds squared errors to the sums.
  V error(std::int64_t r, std::int64_t tile, V yhat, T* sum) {
    if (P.has_targets()) {
      const V difference = yhat - L::at(chunk.y, tile);
      L::put(sum, at.squares, fma(difference, difference, L::at(sum, at.squares)));
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

  // qb of trial i of the group.
  void make_qb(std::int64_t i, std::int64_t tile, V skipped) {
    T* qb = layers.qb;
    if (P.h != nullptr) {
      for (std::int64_t j = 0; j < m; ++j) L::put(qb, j, skipped * L::at(h + i * m * N, j));
    } else {
      L::zero(qb, m);
    }
    for (std::int64_t vector = i * P.H; vector < (i + 1) * P.H; ++vector) {
      const T* W = P.W + (first_trial * P.H + vector) * m * m;
      product(m, 1, m, NumbersAlong<T>{W, m}, Along<T>{gc_of(tile, vector), 0}, ToAlong<T>{qb, 0, T(1), qb});
    }
  }

  // Called with one trial at a time: a stack has no groups.
  void reverse_layers(std::int64_t tile, V g, T* sum) {
    L::zero(layers.Gb, m * m);
    for (std::int64_t vector = 0; vector < P.H; ++vector) {
      L::add_rank_two(g, a_of(tile, vector), v_of(vector), m, layers.Gb);
    }
    layers.reverse(first_trial);
    if (at.p >= 0) {
      T* dp = sum + at.p * N;
      product(m, P.t, m, Across<T>{layers.Gb, m}, Along<T>{p, m}, ToAlong<T>{dp, m, T(2), dp});
    }
    data.add_matrix(tile, layers.Gb);
  }

  // Adds the sums over tiles [tile, end) of the same tasks to the records of one task, or of each lane's
  // task.
  void add_to_records(std::int64_t tile, std::int64_t end) {
    if (at.q >= 0) {
      product(m, trials, end - tile, Across<T>{query(tile), m},
              Across<T>{residuals + tile * trials * N, trials}, ToAlong<T>{sums + at.q * N, at.width});
    }
    for (std::int64_t i = 0; i < trials; ++i) {
      const T* sum = sums + i * at.width * N;
      if (chunk.whole[tile]) {
        L::add_sums(sum, at.width, record(chunk.run[tile * N], i));
        continue;
      }
      for (int l = 0; l < chunk.lanes(tile); ++l) {
        double* to = record(chunk.run[tile * N + l], i);
        for (std::int64_t j = 0; j < at.width; ++j) to[j] += static_cast<double>(sum[j * N + l]);
      }
    }
  }
  double* record(std::int64_t run, std::int64_t i) {
    return records + (run * P.R + first_trial + i) * at.width;
  }

  // dW of all vectors, a few rows at a time: the 16 KiB of lanes' sums stay in L1 until they are added up.
  void add_dW() {
    for (std::int64_t i = 0; i < vectors; ++i) {
      double* block = block_dW + (first_trial * P.H + i) * m * m;
      for (std::int64_t row = 0; row < query_entries; row += dW_rows) {
        const std::int64_t rows = std::min(dW_rows, query_entries - row);
        product(rows, m, chunk.tiles, Across<T>{query(0) + row * N, m}, Across<T>{gc_of(0, i), vectors * m},
                ToAcross<T>{dW, m});
        L::add_sums(dW, rows * m, block + row * m);
      }
    }
  }

  const Plan<T>& plan;
  const Problem<T>& P;
  const Results<T>& out;
  const Record& at;
  const std::int64_t m;
  const bool stack, streamed, gradients, reverses, needs_qb;
  const std::int64_t query_entries;  // of q in the last layer, without the label slot of a drawn query, 0
  Chunk<T> chunk;
  Layers<T> layers;
  DataGradients<T> data;
  LaneTrials<T> lane_trials;
  std::optional<Sampler<T>> sampler;
  std::optional<FactorRows<T>> factor;                    // of drawn sequences, where few vectors use them
  std::int64_t first_trial = 0, trials = 0, vectors = 0;  // of the current group
  std::int64_t dW_rows = 0;                               // rows of dW at a time
  std::int64_t first_tile = 0;                            // of the current part
  T* G;                                                   // [tiles, m, m]
  T* v;                                                   // [vectors, m]
  T* a;                                                   // [tiles at once, vectors, m]
  T* base;                                                // [vectors, m]: the prompt's part of c
  T *c, *e;                                               // [vectors, m]; e holds g a when G is formed
  T* gc;                                                  // [tiles, vectors, m]: g c
  T *h, *p;                                               // [trials, m], [trials, t, m] by the lanes' tasks
  T* last_q;                                              // [tiles, m] after the matrix layers
  T* sums;                                                // [trials, width]
  T* residuals;                                           // [tiles, trials]: dloss/dyhat
  T* dW;                                                  // [rows, m]
  T* scratch;
  double* records;  // [runs of a chunk, R, width]
  double *block_dW = nullptr, *block_dA = nullptr, *block_dC = nullptr;
};
