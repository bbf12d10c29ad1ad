// Draws the tasks and data of sequences from a task source.

constexpr std::int64_t kBlock = 64;  // sequences

inline std::int64_t blocks_of(std::int64_t B) { return (B + kBlock - 1) / kBlock; }

// Calls f(sequences [lanes], count, thread) for the tiles of a batch, in fixed blocks; lanes beyond the last
// sequence repeat it. Returns false if it was interrupted.
template <class T, class F>
bool for_each_tile(std::int64_t B, int threads, Interrupt interrupt, F f) {
  constexpr std::int64_t N = Vec<T>::size;
  Stop stop(interrupt);
  for_each_block(blocks_of(B), threads, [&](std::int64_t block, int thread) {
    if (stop.requested(thread)) return;
    const std::int64_t end = std::min(B, (block + 1) * kBlock);
    for (std::int64_t first = block * kBlock; first < end; first += N) {
      std::int64_t sequences[N];
      for (std::int64_t l = 0; l < N; ++l) sequences[l] = std::min(first + l, end - 1);
      f(sequences, static_cast<int>(std::min(N, end - first)), thread);
    }
  });
  return !stop.requested(0);
}

// task [lanes]: the tasks of sequences [lanes] of a call.
template <class T>
void draw_tasks(const Source& S, const std::int64_t* sequences, std::int64_t* task) {
  constexpr int N = Vec<T>::size;
  std::uint32_t words[N] = {};
  if (S.K > 1 && S.strata == nullptr) {
    Lanes<T> lanes(S.seed, S.step, S.stream);
    lanes.seek(S.offset, sequences);
    lanes.word(0, words);
  }
  for (int l = 0; l < N; ++l) task[l] = S.K > 1 ? Sampler<T>::task(S, sequences[l], words[l]) : 0;
}

template <class T>
bool sample_tasks(const Source& S, std::int64_t B, std::int64_t* task, int threads, Interrupt interrupt) {
  return for_each_tile<T>(B, threads, interrupt, [&](const std::int64_t* sequences, int count, int) {
    std::int64_t lanes[Vec<T>::size];
    draw_tasks<T>(S, sequences, lanes);
    std::copy_n(lanes, count, task + sequences[0]);
  });
}

// Draws a batch and writes it, a tile at a time.
template <class T>
class SampleWorker {
  using L = Tile<T>;
  static constexpr std::int64_t N = L::N, kTokens = Sampler<T>::kTokens;

 public:
  SampleWorker(Arena& arena, const Source& source, bool is_gram)
      : S(source), is_gram(is_gram), m(source.d + 1 + (source.bias ? 1 : 0)), sampler(arena, source) {
    x = arena.take<T>((is_gram ? m : kTokens) * m * N);
    q = arena.take<T>(m * N);
  }

  void tile(const std::int64_t* sequences, int count, const Sample<T>& out) {
    std::int64_t task[N];
    T y[N];
    draw_tasks<T>(S, sequences, task);
    sampler.question(sequences, task, std::all_of(task, task + N, Same{task[0]}), q, y);
    std::copy_n(task, count, out.task + sequences[0]);
    std::copy_n(y, count, out.y + sequences[0]);
    T* to[N];
    for (int l = 0; l < N; ++l) to[l] = out.q + sequences[l] * m;
    L::store(q, m, to, 0, count);
    const std::int64_t length = is_gram ? m * m : S.n * m;
    for (int l = 0; l < N; ++l) to[l] = out.x + sequences[l] * length;
    if (is_gram) {
      sampler.gram(x);
      L::store(x, m * m, to, 0, count);
      return;
    }
    for (std::int64_t first = 0; first < S.n; first += kTokens) {
      const std::int64_t tokens = std::min(kTokens, S.n - first);
      sampler.tokens(first, tokens, x);
      L::store(x, tokens * m, to, first * m, count);
    }
  }

 private:
  struct Same {
    std::int64_t value;
    bool operator()(std::int64_t other) const { return other == value; }
  };

  const Source& S;
  const bool is_gram;
  const std::int64_t m;
  Sampler<T> sampler;
  T *x, *q;
};

template <class T>
bool sample(const Source& S, std::int64_t B, bool is_gram, const Sample<T>& out, int threads,
            Interrupt interrupt) {
  Memory workspace;
  const auto members = workers<SampleWorker<T>>(team_of(blocks_of(B), threads), workspace, S, is_gram);
  return for_each_tile<T>(B, threads, interrupt, [&](const std::int64_t* sequences, int count, int thread) {
    members[static_cast<std::size_t>(thread)]->tile(sequences, count, out);
  });
}
