// The tokens of a tile of sequences, where they lie.

template <class T>
struct Tokens {
  using V = Vec<T>;
  using L = Tile<T>;
  static constexpr std::int64_t N = V::size;
  // Tokens that are transposed at a time: 8 of them are whole vectors in every lane, and stay in L1 up to m
  // = 64.
  static constexpr std::int64_t kMost = 8;
  static std::int64_t group(std::int64_t m) { return m <= 64 ? kMost : 4; }
  static constexpr std::int64_t kLeaf = 128;  // tokens that are summed one after the other

  const T* const* rows;  // [lanes] first token of each
  const T* const* next;  // [lanes] of the tile that comes after; null when that is not known
  std::int64_t row;      // stride of tokens
  std::int64_t n, m;

  // tile [count, m, lanes] of tokens first, first + 1, ... Those of the next tile are asked for beside, which
  // the hardware does not foresee.
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
