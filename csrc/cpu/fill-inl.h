// Random arrays: V::size rows are drawn in lanes, then transposed. Threads share the rows in fixed blocks. A
// number depends only on its row and column.

template <class T>
class Filler {
  using L = Tile<T>;
  static constexpr std::int64_t N = L::N;
  static constexpr std::int64_t kColumns = 64;  // columns of a tile: 4 KB or less

 public:
  static constexpr std::int64_t kRows = 64;  // rows of a block
  enum class Kind { kUniform, kNormal, kChi };

  Filler(Kind kind, T* out, const std::int64_t* freedom, std::int64_t rows, std::int64_t columns,
         const Draws& draws)
      : kind_(kind),
        out_(out),
        freedom_(freedom, freedom + (freedom != nullptr ? columns : 0)),
        rows_(rows),
        columns_(columns),
        draws_(draws),
        lanes_(draws.seed, draws.step, draws.stream) {}

  void block(std::int64_t index) const {
    const std::int64_t end = std::min(rows_, (index + 1) * kRows);
    for (std::int64_t first = index * kRows; first < end; first += N) {
      rows(first, static_cast<int>(std::min(N, end - first)));
    }
  }

 private:
  void rows(std::int64_t first, int count) const {
    Lanes<T> lanes = lanes_;
    std::int64_t sequences[N];
    T* to[N];
    for (int l = 0; l < N; ++l) {
      // Lanes beyond the last row repeat its numbers and write nothing.
      const std::int64_t row = first + std::min(l, count - 1);
      sequences[l] = row;
      to[l] = out_ + row * columns_;
    }
    lanes.seek(draws_.offset, sequences);
    T tile[kColumns * N];
    for (std::int64_t j = 0; j < columns_; j += kColumns) {
      const std::int64_t width = std::min(kColumns, columns_ - j);
      draw(lanes, j, width, tile);
      L::store(tile, width, to, j, count);
    }
  }

  void draw(const Lanes<T>& lanes, std::int64_t j, std::int64_t width, T* tile) const {
    const auto block = draws_.block + static_cast<std::uint32_t>(j / 4);
    if (kind_ == Kind::kUniform) {
      lanes.uniforms(block, width, tile);
    } else if (kind_ == Kind::kNormal) {
      lanes.normals(block, width, tile);
    } else {
      const auto slot = draws_.block + static_cast<std::uint32_t>(kBlocksPerChi * j);
      T words[4 * kColumns * N];
      lanes.chi(slot, freedom_.data() + j, width, words, tile);
    }
  }

  Kind kind_;
  T* out_;
  std::vector<Freedom> freedom_;  // [columns] of chi variates
  std::int64_t rows_, columns_;
  Draws draws_;
  Lanes<T> lanes_;
};

template <class T>
void fill(const Filler<T>& filler, std::int64_t rows, int threads) {
  for_each_block((rows + Filler<T>::kRows - 1) / Filler<T>::kRows, threads,
                 [&](std::int64_t block, int) { filler.block(block); });
}

template <class T>
void fill_uniform(T* out, std::int64_t rows, std::int64_t columns, const Draws& draws, int threads) {
  fill(Filler<T>(Filler<T>::Kind::kUniform, out, nullptr, rows, columns, draws), rows, threads);
}

template <class T>
void fill_normal(T* out, std::int64_t rows, std::int64_t columns, const Draws& draws, int threads) {
  fill(Filler<T>(Filler<T>::Kind::kNormal, out, nullptr, rows, columns, draws), rows, threads);
}

template <class T>
void fill_chi(T* out, const std::int64_t* freedom, std::int64_t rows, std::int64_t slots, const Draws& draws,
              int threads) {
  fill(Filler<T>(Filler<T>::Kind::kChi, out, freedom, rows, slots, draws), rows, threads);
}

// Normals of chosen words: no seed is known to give the extreme ones.
template <class T>
void box_muller_pairs(const std::uint32_t* words, std::int64_t pairs, T* out) {
  constexpr int N = Vec<T>::size;
  for (std::int64_t i = 0; i < pairs; i += N) {
    const int count = static_cast<int>(std::min<std::int64_t>(N, pairs - i));
    std::uint64_t inputs[2][N] = {};
    for (int l = 0; l < 2 * count; ++l) inputs[l % 2][l / 2] = words[2 * i + l];
    T normals[2][N];
    Lanes<T>::pair(inputs[0], inputs[1], normals[0], normals[1]);
    for (int l = 0; l < 2 * count; ++l) out[2 * i + l] = normals[l % 2][l / 2];
  }
}
