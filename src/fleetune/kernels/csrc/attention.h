// Softmax attention of sequences of different lengths that lie one after the other, without padding.
#pragma once

#include <cstdint>

#include "random.h"

namespace fleetune {

// Rows of several heads, each `width` columns wide; rows are `row` elements apart.
template <class T>
struct Heads {
  T* data;
  int64_t row;

  T* at(int64_t index, int64_t head, int64_t width) const { return data + index * row + head * width; }
};

// What is added to q k' of query i and key j of a sequence: column j - i + distances / 2 of the head's row.
struct Bias {
  const float* data = nullptr;  // heads x distances; null: nothing
  int64_t distances = 0;        // odd, and at least twice the longest sequence less one

  const float* of_query(int64_t head, int64_t query) const { return data + head * distances + distances / 2 - query; }
};

// Sequence s has the query rows cu_q[s] to cu_q[s + 1] and the key rows cu_k[s] to cu_k[s + 1].
struct Sequences {
  const int64_t *cu_q, *cu_k;
  int64_t count, num_heads, width;
  float scale;
  int64_t window;  // query i of a sequence sees keys |i - j| <= window; 0: all keys
  Dropout dropout;
  Bias bias = {};
};

// out = dropout(softmax(scale (q k' + bias))) v; lse (query rows x heads): log of the softmax' denominators.
template <class T>
void attention_forward(const Sequences& sequences, Heads<const T> q, Heads<const T> k, Heads<const T> v, Heads<T> out,
                       float* lse);

// Gradients of the inputs, from that of `out`. The probabilities are computed again, not kept. `dbias` (heads x
// distances) may be null.
template <class T>
void attention_backward(const Sequences& sequences, Heads<const T> dout, Heads<const T> q, Heads<const T> k,
                        Heads<const T> v, const float* lse, Heads<T> dq, Heads<T> dk, Heads<T> dv,
                        float* dbias = nullptr);

}  // namespace fleetune
