// Philox4x32-10 on 64-bit lanes, W, whose low halves hold the words: a product of two words fills its lane,
// and the next round uses it without a shuffle. The high halves hold garbage, which products ignore. Included
// once for each kind of lane, after its Vec.

FASTLIN_HD constexpr std::uint32_t philox_multiplier(int i) { return i == 0 ? 0xD2511F53u : 0xCD9E8D57u; }
// The golden ratio, sqrt(3) - 1.
FASTLIN_HD constexpr std::uint32_t philox_weyl(int i) { return i == 0 ? 0x9E3779B9u : 0xBB67AE85u; }

// Half of the first two rounds depends only on the sequence, and half only on the block, which all lanes
// share. For each pair of sequence and block only two exclusive ors remain.
template <class W>
struct PhiloxSequence {
  W word0, word2, word3;
};

struct PhiloxBlock {
  std::uint32_t word0, word1, word2;
};

template <class W>
class Philox {
 public:
  FASTLIN_HD Philox(std::uint64_t seed, std::uint32_t step, std::uint32_t stream)
      : first_{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)},
        stream_((stream & 0xffu) << 24),
        step_(step | (stream >> 8) << 24) {
    for (int i = 0; i < 2; ++i) {
      multiplier_[i] = W::set(philox_multiplier(i));
      std::uint32_t key = first_[i] + 2 * philox_weyl(i);
      for (int round = 0; round < kRounds; ++round, key += philox_weyl(i)) key_[round][i] = W::set(key);
    }
  }

  FASTLIN_HD PhiloxSequence<W> sequence(W index) const {
    const W odd = multiply_words(high_word(index), multiplier_[1]);
    const W even = multiply_words(high_word(odd) ^ index ^ W::set(first_[0]), multiplier_[0]);
    return {odd, high_word(even), even};
  }

  FASTLIN_HD PhiloxBlock block(std::uint32_t index) const {
    const std::uint64_t even = std::uint64_t{philox_multiplier(0)} * (index | stream_);
    const std::uint32_t word2 = static_cast<std::uint32_t>(even >> 32) ^ step_ ^ first_[1];
    const std::uint64_t odd = std::uint64_t{philox_multiplier(1)} * word2;
    return {static_cast<std::uint32_t>(odd >> 32) ^ (first_[0] + philox_weyl(0)),
            static_cast<std::uint32_t>(odd), static_cast<std::uint32_t>(even) ^ (first_[1] + philox_weyl(1))};
  }

  // c [4]: the counter of a sequence and a block after two rounds.
  FASTLIN_HD FASTLIN_INLINE void start(const PhiloxSequence<W>& sequence, PhiloxBlock block,
                                       W (&c)[4]) const {
    c[0] = sequence.word0 ^ W::set(block.word0);
    c[1] = W::set(block.word1);
    c[2] = sequence.word2 ^ W::set(block.word2);
    c[3] = sequence.word3;
  }

  // The other rounds of N independent counters; turns c into the random words.
  template <int N>
  FASTLIN_HD FASTLIN_INLINE void finish(W (&c)[N][4]) const {
    FASTLIN_UNROLL
    for (int round = 0; round < kRounds; ++round) {
      FASTLIN_UNROLL
      for (int i = 0; i < N; ++i) {
        const W even = multiply_words(c[i][0], multiplier_[0]), odd = multiply_words(c[i][2], multiplier_[1]);
        c[i][0] = xor3(high_word(odd), c[i][1], key_[round][0]);
        c[i][1] = odd;
        c[i][2] = xor3(high_word(even), c[i][3], key_[round][1]);
        c[i][3] = even;
      }
    }
  }

 private:
  static constexpr int kRounds = 8;  // after the first two
  W key_[kRounds][2], multiplier_[2];
  std::uint32_t first_[2], stream_, step_;
};

// The step of a source's draws; a GPU reads it from its memory where the source says so.
FASTLIN_HD inline std::uint32_t current_step(const Source& source) {
#if defined(__CUDA_ARCH__) || defined(FASTLIN_EMULATED)
  if (source.device_step != nullptr) return static_cast<std::uint32_t>(*source.device_step);
#endif
  return source.step;
}
