// Losses, predictions and their gradients on a GPU, in the letters of cpu/lanes_are_sequences-inl.h.
//
// Mapping. Lanes are sequences: a block takes 32 at a time, a tile, in the order of their tasks, and forms
// their Gram matrices once; its warps then share out the trials. A lane works on its own sequence: what a
// sequence costs does not depend on m by steps of a warp's size, and no product has a sum over lanes. Only
// sums over the batch go across.
//
// Memory. [entries, 32 lanes] in shared memory: G (m^2), q (m), and for each warp v, a, c, e (4 H m) and the
// sums of a trial. At m = 11, float: 17 KB and 8 KB a warp. Registers hold the 16 sums of a part of a
// product. What does not fit, above all the matrices of a stack, lies in global memory in the same layout,
// whole lines for each warp.
//
// Work for a sequence, multiply-adds: n m (m + 1) / 2 for G from tokens; m^2 for each of a, c, e and dW for
// each trial and head. Bytes: 4 n m of tokens, once, whole
// lines; W, v and p come from the cache. Tokens are never streamed past vectors as on a CPU: G costs 5 times
// the multiply-adds of one vector at m = 33, and hides behind the reads still.
//
// Sums are deterministic: a trial of a tile belongs to one warp, which adds it in double to the sums of its
// block of tiles; a second kernel adds the blocks in their order. Blocks depend on the problem alone, so that
// a result has the same bits on every GPU.

// Sequences in the order of their tasks; all null when there is one task.
struct Order {
  const std::int64_t* sequence;  // [B] by task
  const std::int64_t* task;      // [B] of these
  const std::int64_t* start;     // [K + 1] where each task starts among them
};

template <class T>
struct Call {
  Problem<T> P;
  Results<T> out;
  Order order;
  Record at;
  std::int64_t blocks, block_size;  // of positions in the order, whole tiles
  std::int64_t matrices;            // numbers of dW, dA, dC together
  double* partial;                  // [blocks, matrices]
  double* ends;                     // [blocks, 2, R, width] of the first and the last task of a block
  double* records;                  // [K, R, width] of all tasks that lie within a block
  std::byte* scratch;               // for each CUDA block; null when it is in shared memory
  std::int64_t context_bytes, trial_bytes, scratch_bytes;

  FASTLIN_HD double count(std::int64_t k) const {
    if (P.counts != nullptr) return static_cast<double>(P.counts[k]);
    return static_cast<double>(order.start == nullptr ? P.B : order.start[k + 1] - order.start[k]);
  }
  FASTLIN_HD double total() const { return static_cast<double>(P.counts != nullptr ? P.total : P.B); }
  FASTLIN_HD std::int64_t task(std::int64_t position) const {
    return order.task == nullptr ? 0 : order.task[position];
  }
  FASTLIN_HD double* record(std::int64_t k, std::int64_t r) const {
    return records + (k * P.R + r) * at.width;
  }
  FASTLIN_HD double* end(std::int64_t block, bool last, std::int64_t r) const {
    return ends + ((block * 2 + (last ? 1 : 0)) * P.R + r) * at.width;
  }
  FASTLIN_HD bool of_data() const { return out.dx != nullptr || out.dq != nullptr; }
  FASTLIN_HD bool gradients() const {
    return of_data() || out.dW != nullptr || out.dv != nullptr || out.dh != nullptr || out.dp != nullptr ||
           out.dA != nullptr || out.dC != nullptr;
  }
};

// What the warps of a block share while they work on a tile.
template <class T>
struct Context {
  static constexpr std::int64_t N = Vec<T>::size;

  FASTLIN_HD Context(Arena& arena, const Call<T>& call) {
    const std::int64_t m = call.P.m;
    sequence = arena.take<std::int64_t>(N);
    task = arena.take<std::int64_t>(N);
    starts = arena.take<unsigned>(1);
    y = arena.take<T>(N);
    coefficient = arena.take<T>(N);
    q = arena.take<T>(m * N);
    G = arena.take<T>(m * m * N);
    dq = arena.take<T>(call.out.dq != nullptr ? m * N : 0);
    dG = arena.take<T>(call.out.dx != nullptr ? m * m * N : 0);
  }

  std::int64_t *sequence, *task;  // [lanes]; lanes without a sequence repeat the last one
  unsigned* starts;               // bit l: lane l is the first of its task in the tile
  T *y, *coefficient;             // [lanes] targets, and what their squared errors have in the loss
  T *q, *G;                       // [m], [m, m]
  T *dq, *dG;                     // sums over trials
};

// Makes the Gram matrices of a tile, from tokens or stored matrices, and takes gradients back to tokens.
template <class T>
class Forming {
  using L = Tile<T>;
  static constexpr std::int64_t N = L::N, kTokens = 8;  // staged at a time

 public:
  FASTLIN_HD Forming(Arena& arena, const Call<T>& call, int warp, int warps)
      : call(call), P(call.P), m(call.P.m), warp(warp), warps(warps) {
    tokens = arena.take<T>(P.is_gram ? 0 : kTokens * m * N);
    of_tokens = arena.take<T>(P.is_gram || call.out.dx == nullptr ? 0 : kTokens * m * N);
    staging = arena.take<T>(warps * L::kStaging) + (arena.only_counts() ? 0 : warp * L::kStaging);
  }

  // All warps together; `lanes` have a sequence.
  FASTLIN_HD void form(const Context<T>& tile, int lanes) {
    if (warp == 0 && P.q != nullptr) {
      L::load_rows(P.q, m, tile.sequence, P.q_batch, 0, lanes, 0, 1, staging, tile.q);
    }
    if (P.is_gram) {
      load_matrices(tile, lanes);
    } else {
      sum_tokens(tile, lanes);
    }
    if (!P.see_query) return;
    for (std::int64_t i = warp; i < m; i += warps) {
      const auto qi = L::at(tile.q, i);
      for (std::int64_t j = 0; j < m; ++j) {
        L::put(tile.G, i * m + j, fma(qi, L::at(tile.q, j), L::at(tile.G, i * m + j)));
      }
    }
    sync_block();
  }

  // Writes what the tile's sums over trials say of the data. One warp.
  FASTLIN_HD void store(const Context<T>& tile, int lanes) {
    if (call.out.dq != nullptr) {
      L::store_rows(tile.dq, m, tile.sequence, m, 0, lanes, 0, 1, staging, call.out.dq);
    }
    if (call.out.dx == nullptr) return;
    if (P.is_gram) {
      L::store_rows(tile.dG, m * m, tile.sequence, m * m, 0, lanes, 0, 1, staging, call.out.dx);
      return;
    }
    for (std::int64_t first = 0; first < P.n; first += kTokens) {
      const std::int64_t count = P.n - first < kTokens ? P.n - first : kTokens;
      load_tokens(tile, lanes, first, count);
      product(m, count, m, Across<T>{tile.dG, m}, Along<T>{tokens, m}, ToAlong<T>{of_tokens, m, T(2)});
      L::store_rows(of_tokens, count * m, tile.sequence, P.n * m, first * m, lanes, 0, 1, staging,
                    call.out.dx);
    }
  }

  // Writes the Gram matrices. All warps together.
  FASTLIN_HD void store_gram(const Context<T>& tile, int lanes, T* G) {
    L::store_rows(tile.G, m * m, tile.sequence, m * m, 0, lanes, warp, warps, staging, G);
  }

 private:
  FASTLIN_HD void load_matrices(const Context<T>& tile, int lanes) {
    for (std::int64_t i = warp; i < m; i += warps) {
      L::load_rows(P.x, m, tile.sequence, P.x_batch, i * P.x_row, lanes, 0, 1, staging, tile.G + i * m * N);
    }
    sync_block();
    // The symmetric part; an entry and its mirror are one warp's.
    for (std::int64_t i = warp; i < m; i += warps) {
      for (std::int64_t j = 0; j < i; ++j) {
        const auto mean = Vec<T>::set(T(0.5)) * (L::at(tile.G, i * m + j) + L::at(tile.G, j * m + i));
        L::put(tile.G, i * m + j, mean);
        L::put(tile.G, j * m + i, mean);
      }
    }
    sync_block();
  }

  FASTLIN_HD void load_tokens(const Context<T>& tile, int lanes, std::int64_t first, std::int64_t count) {
    if (P.x_row == m) {
      L::load_rows(P.x, count * m, tile.sequence, P.x_batch, first * m, lanes, warp, warps, staging, tokens);
      return;
    }
    for (std::int64_t i = warp; i < count; i += warps) {
      L::load_rows(P.x, m, tile.sequence, P.x_batch, (first + i) * P.x_row, lanes, 0, 1, staging,
                   tokens + i * m * N);
    }
  }

  // G = sum z z': four rows of the lower triangle for a warp at a time, then the mirror.
  FASTLIN_HD void sum_tokens(const Context<T>& tile, int lanes) {
    constexpr std::int64_t kRows = 4;
    for (std::int64_t i = warp; i < m * m; i += warps) L::put(tile.G, i, Vec<T>::zero());
    for (std::int64_t first = 0; first < P.n; first += kTokens) {
      const std::int64_t count = P.n - first < kTokens ? P.n - first : kTokens;
      sync_block();
      load_tokens(tile, lanes, first, count);
      sync_block();
      for (std::int64_t i = warp * kRows; i < m; i += warps * kRows) {
        const std::int64_t rows = m - i < kRows ? m - i : kRows;
        T* to = tile.G + i * m * N;
        product_parts<kRows, 4>(rows, i + rows, count, Across<T>{tokens + i * N, m}, Across<T>{tokens, m},
                                ToAcross<T>{to, m, T(1), to}, false);
      }
    }
    sync_block();
    for (std::int64_t i = warp; i < m; i += warps) {
      for (std::int64_t j = 0; j < i; ++j) L::put(tile.G, j * m + i, L::at(tile.G, i * m + j));
    }
    sync_block();
  }

  const Call<T>& call;
  const Problem<T>& P;
  const std::int64_t m;
  const int warp, warps;
  T *tokens = nullptr, *of_tokens = nullptr;  // [kTokens, m]
  T* staging = nullptr;
};
