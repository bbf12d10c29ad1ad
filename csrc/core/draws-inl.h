// The random numbers of V::size sequences, one sequence in each lane. core/philox.h has the layout.

template <class T>
class Lanes {
  using V = Vec<T>;
  using D = Vec<double>;
  using W = Vec<std::uint64_t>;
  using I = std::conditional_t<std::is_same<T, float>::value, Vec<std::uint32_t>, W>;
  static constexpr int N = V::size;
  static constexpr int kParts = N / D::size;  // vectors of doubles that hold V::size sequences

 public:
  FASTLIN_HD Lanes(std::uint64_t seed, std::uint32_t step, std::uint32_t stream)
      : philox_(seed, step, stream) {}

  // Selects sequences offset + sequences[i], i < V::size, in any order.
  FASTLIN_HD void seek(std::uint64_t offset, const std::int64_t* sequences) {
    const auto* from = reinterpret_cast<const std::uint64_t*>(sequences);
    for (int p = 0; p < kParts; ++p) {
      sequence_[p] = philox_.sequence(W::load(from + p * W::size) + W::set(offset));
    }
  }

  // The first word of a block.
  void word(std::uint32_t block, std::uint32_t* out) const {  // [V::size]
    W c[kParts][4];
    draw(block, c);
    for (int p = 0; p < kParts; ++p) {
      std::uint64_t lanes[W::size];
      c[p][0].store(lanes);
      for (int l = 0; l < W::size; ++l) out[p * W::size + l] = static_cast<std::uint32_t>(lanes[l]);
    }
  }

  // `count` uniforms, starting at a block.
  FASTLIN_HD void uniforms(std::uint32_t block, std::int64_t count, T* out) const {  // [count, V::size]
    for (std::int64_t i = 0; i < count; i += 4) {
      W c[kParts][4];
      draw(block++, c);
      for (int j = 0; j < 4 && i + j < count; ++j) {
        for (int p = 0; p < kParts; ++p) {
          store_rounded(uniform<D>(c[p][j]), out + (i + j) * N + p * D::size);
        }
      }
    }
  }

  // `count` normals, starting at a block, [whole blocks, V::size]: `out` holds their words first. One loop
  // over blocks and one over pairs, each short enough for a CPU to look ahead over several of its rounds.
  FASTLIN_HD void normals(std::uint32_t block, std::int64_t count, T* out) const {
    words_as_numbers(block, count, out);
    for (std::int64_t i = 0; i < count; i += 2) {
      V first, second;
      normal_pairs(bits_of(V::load(out + i * N)), bits_of(V::load(out + (i + 1) * N)), first, second);
      first.store(out + i * N);
      second.store(out + (i + 1) * N);
    }
  }

  // The two normals of two words, in each lane.
  static void pair(const std::uint64_t* words0, const std::uint64_t* words1, T* first, T* second) {
    W w0[kParts], w1[kParts];
    for (int p = 0; p < kParts; ++p) {
      w0[p] = W::load(words0 + p * W::size);
      w1[p] = W::load(words1 + p * W::size);
    }
    I joined0, joined1;
    join(w0, joined0);
    join(w1, joined1);
    V x, y;
    normal_pairs(joined0, joined1, x, y);
    x.store(first);
    y.store(second);
  }

  // Chi variates of consecutive slots, [slots, V::size]; slot i has the constants freedom[i]. In float
  // `words` has room for the words of the first attempts, [3 slots, V::size]: one loop over blocks and one
  // over attempts, as for normals.
  FASTLIN_HD void chi(std::uint32_t block, const Freedom* freedom, std::int64_t slots, T* words,
                      T* out) const {
    std::int64_t i = 0;
    if constexpr (std::is_same<T, float>::value) {
      for (; i + kBlocks <= slots; i += kBlocks) first_words<kBlocks>(chi_block(block, i), words + 4 * i * N);
      for (; i < slots; ++i) first_words<1>(chi_block(block, i), words + 4 * i * N);
      for (i = 0; i < slots; ++i) {
        chi_in_float(chi_block(block, i), freedom + i, words + 4 * i * N, out + i * N);
      }
    } else {
      for (; i + kSlots <= slots; i += kSlots) {
        chi_in_double<kSlots>(chi_block(block, i), freedom + i, out + i * N);
      }
      for (; i < slots; ++i) chi_in_double<1>(chi_block(block, i), freedom + i, out + i * N);
    }
  }

 private:
  // Blocks, and slots in double, that are computed together: the products of one Philox block depend on each
  // other and would leave a CPU idle. A GPU runs other warps meanwhile.
  static constexpr bool kAlone = V::registers < 16;
  static constexpr int kBlocks = kAlone ? 1 : 2, kSlots = kAlone ? 1 : 4;

  FASTLIN_HD static std::uint32_t chi_block(std::uint32_t first, std::int64_t slot) {
    return first + static_cast<std::uint32_t>(kBlocksPerChi * slot);
  }

  FASTLIN_HD FASTLIN_INLINE void draw(std::uint32_t block, W (&c)[kParts][4]) const {
    const PhiloxBlock shared = philox_.block(block);
    FASTLIN_UNROLL
    for (int p = 0; p < kParts; ++p) philox_.start(sequence_[p], shared, c[p]);
    philox_.finish(c);
  }

  // The definition: all attempts in double.
  template <int S>
  FASTLIN_HD FASTLIN_INLINE void chi_in_double(std::uint32_t block, const Freedom* freedom, T* out) const {
    constexpr int kChains = S * kParts;
    using Ds = Parts<D, kChains>;
    using Ws = Parts<W, kChains>;
    Ds k, shape, scale;
    FASTLIN_UNROLL
    for (int i = 0; i < kChains; ++i) {
      const Freedom& constants = freedom[i / kParts];
      k.part[i] = D::set(constants.k);
      shape.part[i] = D::set(constants.shape);
      scale.part[i] = D::set(constants.scale);
    }
    Chi<Ds, Ws> chi(k, shape, scale);
    bool needs_block = true;
    for (std::uint32_t j = 0; needs_block && j < kBlocksPerChi; ++j) {
      W c[kChains][4];
      chi_words<S>(block + j, c);
      Ws words[4];
      FASTLIN_UNROLL
      for (int i = 0; i < 4 * kChains; ++i) words[i % 4].part[i / 4] = c[i / 4][i % 4];
      needs_block = chi.block(words);
    }
    FASTLIN_UNROLL
    for (int i = 0; i < kChains; ++i) store_rounded(chi.value.part[i], out + i * D::size);
  }

  // The attempts of the first block in float; a slot with a lane that they do not settle follows the
  // definition, and that lane takes the definition's number.
  FASTLIN_HD FASTLIN_INLINE void chi_in_float(std::uint32_t block, const Freedom* freedom, const T* words,
                                              T* out) const {
    const auto word = [=](int i) { return bits_of(V::load(words + i * N)); };
    V x, next, value, second;
    box_muller(word(0), word(1), x, next);
    const auto open = float_attempt(x, word(2), *freedom, value);
    if (freedom->k == 1.0) {
      value = as_float(bits_of(x) & I::set(0x7fffffffu));
    } else if (any(open)) {
      const auto unsettled =
          not_surely_rejected(x, word(2), *freedom) | float_attempt(next, word(3), *freedom, second);
      value = select(open, second, value);
      if (any(open & unsettled)) {
        chi_in_double<1>(block, freedom, out);
        value = select(open & unsettled, V::load(out), value);
      }
    }
    value.store(out);
  }

  // The first blocks of S slots, [S, 4, V::size], as the bits of numbers.
  template <int S>
  FASTLIN_HD FASTLIN_INLINE void first_words(std::uint32_t block, T* out) const {
    W c[S * kParts][4];
    chi_words<S>(block, c);
    FASTLIN_UNROLL
    for (int i = 0; i < 4 * S; ++i) {
      W parts[kParts];
      FASTLIN_UNROLL
      for (int p = 0; p < kParts; ++p) parts[p] = c[i / 4 * kParts + p][i % 4];
      I word;
      join(parts, word);
      as_number(word).store(out + i * N);
    }
  }

  // Words of block `block` of S consecutive slots.
  template <int S>
  FASTLIN_HD FASTLIN_INLINE void chi_words(std::uint32_t block, W (&c)[S * kParts][4]) const {
    FASTLIN_UNROLL
    for (int i = 0; i < S * kParts; ++i) {
      philox_.start(sequence_[i % kParts], philox_.block(chi_block(block, i / kParts)), c[i]);
    }
    philox_.finish(c);
  }

  // Words in the lanes that `normal_pairs` takes.
  FASTLIN_HD FASTLIN_INLINE static void join(const W (&parts)[kParts], Vec<std::uint32_t>& w) {
    w = words_of(parts);
  }
  FASTLIN_HD FASTLIN_INLINE static void join(const W (&parts)[kParts], W& w) { w = parts[0]; }

  template <int B>
  FASTLIN_HD FASTLIN_INLINE void words_of_blocks(std::uint32_t block, I (&words)[4 * B]) const {
    W c[B * kParts][4];
    FASTLIN_UNROLL
    for (int b = 0; b < B; ++b) {
      const PhiloxBlock shared = philox_.block(block + static_cast<std::uint32_t>(b));
      FASTLIN_UNROLL
      for (int p = 0; p < kParts; ++p) philox_.start(sequence_[p], shared, c[b * kParts + p]);
    }
    philox_.finish(c);
    FASTLIN_UNROLL
    for (int i = 0; i < 4 * B; ++i) {
      W parts[kParts];
      FASTLIN_UNROLL
      for (int p = 0; p < kParts; ++p) parts[p] = c[i / 4 * kParts + p][i % 4];
      join(parts, words[i]);
    }
  }

  // For one vector of pairs, or several as Parts.
  template <class Words, class Normals>
  FASTLIN_HD FASTLIN_INLINE static void normal_pairs(Words w0, Words w1, Normals& first, Normals& second) {
    if constexpr (std::is_same<T, float>::value) {
      box_muller(w0, w1, first, second);
    } else {
      fixed_box_muller(w0, w1, first, second);
    }
  }

  // The words of blocks that hold `count` draws, as the bits of numbers.
  FASTLIN_HD void words_as_numbers(std::uint32_t block, std::int64_t count, T* out) const {
    for (; count > 4 * (kBlocks - 1); count -= 4 * kBlocks, block += kBlocks, out += 4 * kBlocks * N) {
      block_as_numbers<kBlocks>(block, out);
    }
    if (count > 0) block_as_numbers<1>(block, out);
  }
  template <int B>
  FASTLIN_HD FASTLIN_INLINE void block_as_numbers(std::uint32_t block, T* out) const {
    I words[4 * B];
    words_of_blocks<B>(block, words);
    FASTLIN_UNROLL
    for (int i = 0; i < 4 * B; ++i) as_number(words[i]).store(out + i * N);
  }
  FASTLIN_HD FASTLIN_INLINE static Vec<float> as_number(Vec<std::uint32_t> w) { return as_float(w); }
  FASTLIN_HD FASTLIN_INLINE static Vec<double> as_number(Vec<std::uint64_t> w) { return as_double(w); }

  Philox<W> philox_;
  PhiloxSequence<W> sequence_[kParts];
};
