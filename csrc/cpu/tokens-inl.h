// The tokens of a tile of sequences, in the caller's memory.

template <class T>
struct Tokens {
  using V = Vec<T>;
  using L = Tile<T>;
  static constexpr std::int64_t N = V::size;
  // Tokens transposed at a time: 8 tokens of each lane are whole vectors, and fit L1 up to m = 64.
  static constexpr std::int64_t kMost = 8;
  static std::int64_t at_once(std::int64_t m) { return m <= 64 ? kMost : 4; }
  static constexpr std::int64_t kLeaf = 128;  // longer sums are split in halves

  const T* const* rows;  // [lanes] first token of each sequence
  const T* const* next;  // [lanes] the same for the next tile; null if unknown
  std::int64_t row;      // stride between tokens
  std::int64_t n, m;

  // tile [count, m, lanes] of tokens first ... first + count - 1. Prefetches those of the next tile, which
  // the hardware does not predict.
  void load(std::int64_t first, std::int64_t count, T* tile) const {
    if (row == m) {
      L::load(rows, first * m, count * m, tile, next);
    } else {
      for (std::int64_t i = 0; i < count; ++i) L::load(rows, (first + i) * row, m, tile + i * m * N, next);
    }
  }

  static std::int64_t depth(std::int64_t n, std::int64_t leaf) {
    std::int64_t levels = 0;
    while (n > leaf) n = (n + 1) / 2, ++levels;
    return levels;
  }
  static std::int64_t middle(std::int64_t begin, std::int64_t end) {
    return begin + ((end - begin) / 2 + 7) / 8 * 8;
  }
};
