#include "attention.h"

#include <omp.h>

#include <initializer_list>
#include <numeric>

#include "product.h"
#include "scratch.h"
#include "simd.h"

namespace fleetune {
namespace {

constexpr int64_t kScores = 48 * 1024;  // of a block of queries: two such blocks stay in the second-level cache

// One head of one sequence.
struct Item {
  int64_t sequence, head, q_first, num_q, k_first, num_k;
};

// All items, the most expensive first, so that threads that take the next one end at about the same time.
std::vector<Item> items_of(const Sequences& s) {
  std::vector<int64_t> order(s.count);
  std::iota(order.begin(), order.end(), 0);
  const auto cost = [&](int64_t i) { return (s.cu_q[i + 1] - s.cu_q[i]) * (s.cu_k[i + 1] - s.cu_k[i]); };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return cost(a) > cost(b); });
  std::vector<Item> items;
  items.reserve(s.count * s.num_heads);
  for (const int64_t i : order)
    for (int64_t h = 0; h < s.num_heads; h++)
      items.push_back({i, h, s.cu_q[i], s.cu_q[i + 1] - s.cu_q[i], s.cu_k[i], s.cu_k[i + 1] - s.cu_k[i]});
  return items;
}

int64_t padded(int64_t columns) { return ceil_div(columns, kNR) * kNR; }

// result (rows x columns, rounded up to whole panels) = or += A B, with panels of B that are `b_depth` deep, of which
// the first `depth` lines are used.
void multiply_packed(Left a, int64_t rows, int64_t depth, const float* b, int64_t b_depth, int64_t columns,
                     float* result, int64_t result_row, bool adds) {
  for (int64_t i = 0; i < rows; i += kMR) {
    const Left block{a.data + i * a.row, a.row, a.step};
    const int height = int(std::min<int64_t>(kMR, rows - i));
    float* c = result + i * result_row;
    for (int64_t j = 0; j < columns; j += kNR)
      multiply_tile(height, depth, block, b + j * b_depth, c + j, result_row, adds ? c + j : nullptr, result_row);
  }
}

// Rows as a left-hand side in float32: themselves, or converted into `buffer`.
Left left_rows(const float* data, int64_t row, int64_t, int64_t, Scratch&) { return {data, row, 1}; }
Left left_rows(const bf16* data, int64_t row, int64_t rows, int64_t width, Scratch& buffer) {
  float* out = buffer.at_least(rows * width);
  for (int64_t i = 0; i < rows; i++) as_floats(data + i * row, out + i * width, width);
  return {out, width, 1};
}

template <class T>
void store_rows(const float* from, int64_t from_row, int64_t rows, int64_t columns, T* to, int64_t to_row) {
  for (int64_t i = 0; i < rows; i++)
#pragma omp simd
    for (int64_t j = 0; j < columns; j++) to[i * to_row + j] = from_float<T>(from[i * from_row + j]);
}

// Part of a row of scores that is worked on. It ends with a whole panel, so that no loop has a remainder; what its
// query does not see is overwritten.
struct Range {
  int64_t begin, end;   // multiples of kNR
  int64_t first, last;  // keys that are seen

  void hide(float* row, float value) const {
    std::fill(row + begin, row + first, value);
    std::fill(row + last, row + end, value);
  }
};

// How the queries of an item are cut into blocks, and the keys that they see.
class Blocks {
 public:
  int64_t num_queries;  // of a block
  int64_t row;          // scores of a query, rounded up to whole panels and to dropout's groups

  Blocks(const Sequences& s, const Item& item)
      : row(padded_to_32(padded(item.num_k))), num_k_(item.num_k), window_(s.window) {
    const int64_t fitting = std::max<int64_t>(kMR, kScores / std::max<int64_t>(1, row) / kMR * kMR);
    num_queries = std::min(fitting, ceil_div(item.num_q, kMR) * kMR);
  }

  bool windowed() const { return window_ > 0; }

  // Keys that any of the queries `first` to `last` sees.
  Range range_of(int64_t first, int64_t last) const {
    const int64_t first_key = windowed() ? std::max<int64_t>(0, first - window_) : 0;
    const int64_t last_key = windowed() ? std::min(num_k_, last + window_ + 1) : num_k_;
    return {first_key / kNR * kNR, padded(last_key), first_key, last_key};
  }

  // The same for one query of a block.
  Range range_of(int64_t query, const Range& block) const {
    const Range own = range_of(query, query);
    return {block.begin, block.end, own.first, own.last};
  }

 private:
  int64_t num_k_, window_;
};

constexpr float kHidden = -1e30f;  // a score whose exp is zero

struct Softmax {
  float log_sum, factor;  // probabilities are exponentials * factor
};

// Row of scores -> exponentials, in place.
Softmax exponentiate(float* row, const Range& range, float scale) {
  range.hide(row, kHidden);
  float greatest = kHidden, sum = 0.0f;
  for (int64_t b = range.begin; b < range.end; b += kNR)
#pragma omp simd reduction(max : greatest)  // std::max, which returns a reference, is not vectorised
    for (int64_t j = b; j < b + kNR; j++) greatest = row[j] > greatest ? row[j] : greatest;
  const float shift = greatest * scale;
  for (int64_t b = range.begin; b < range.end; b += kNR)
#pragma omp simd reduction(+ : sum)
    for (int64_t j = b; j < b + kNR; j++) {
      row[j] = exp_f(row[j] * scale - shift);
      sum += row[j];
    }
  return {shift + std::log(sum), 1.0f / sum};
}

// Adds the bias of the keys that a query sees to its products.
void add_bias(const Sequences& s, const Item& item, int64_t query, const Range& range, float* row) {
  if (!s.bias.data) return;
  const float* bias = s.bias.of_query(item.head, query);
#pragma omp simd
  for (int64_t j = range.first; j < range.last; j++) row[j] += bias[j];
}

// Factors of a row's probabilities: dropout's, or left as they are (one).
void draw_factors(const Sequences& s, const Item& item, int64_t query, const Range& range, float* factors) {
  if (s.dropout.active())
    s.dropout.factors(item.q_first + query, item.head, range.begin / 32 * 32, range.end, factors);
}

// Asks for the rows of the item that comes next, one a call: they lie far apart, which no prefetcher of a CPU follows.
template <class T>
void fetch_row(const Item* next, int64_t index, const Sequences& s, std::initializer_list<Heads<const T>> by_query,
               std::initializer_list<Heads<const T>> by_key) {
  if (!next) return;
  const auto fetch = [&](const T* row) {
    for (int64_t j = 0; j < s.width; j += 64 / int64_t(sizeof(T))) __builtin_prefetch(row + j);
  };
  if (index < next->num_q)
    for (const Heads<const T>& x : by_query) fetch(x.at(next->q_first + index, next->head, s.width));
  if (index < next->num_k)
    for (const Heads<const T>& x : by_key) fetch(x.at(next->k_first + index, next->head, s.width));
}

// Items that a thread takes at once: the heads of a sequence lie beside each other.
int64_t items_at_once(size_t count) {
  return std::clamp<int64_t>(int64_t(count) / (8 * omp_get_max_threads()), 1, 12);
}

struct ForwardMemory {
  Scratch keys, values, queries, scores, out, factors;
};

template <class T>
void forward_item(const Sequences& s, const Item& item, const Item* next, Heads<const T> q, Heads<const T> k, Heads<const T> v,
                  Heads<T> out, float* lse, ForwardMemory& memory) {
  const Blocks blocks(s, item);
  const int64_t width = padded(s.width), num_k = item.num_k;
  float* keys = memory.keys.at_least(blocks.row * s.width);
  float* values = memory.values.at_least(width * num_k);
  float* scores = memory.scores.at_least(blocks.num_queries * blocks.row);
  float* result = memory.out.at_least(blocks.num_queries * width);
  float* factors = memory.factors.at_least(blocks.row);
  std::fill(factors, factors + blocks.row, 1.0f);
  pack_panels<kNR>(Lines<T>{k.at(item.k_first, item.head, s.width), k.row, 1}, num_k, s.width, keys, kNR * s.width);
  pack_panels<kNR>(Lines<T>{v.at(item.k_first, item.head, s.width), 1, v.row}, s.width, num_k, values, kNR * num_k);
  for (int64_t q0 = 0; q0 < item.num_q; q0 += blocks.num_queries) {
    const int64_t count = std::min(blocks.num_queries, item.num_q - q0), first_row = item.q_first + q0;
    const Range block = blocks.range_of(q0, q0 + count - 1);
    const Left queries = left_rows(q.at(first_row, item.head, s.width), q.row, count, s.width, memory.queries);
    multiply_packed(queries, count, s.width, keys + block.begin * s.width, s.width, block.end - block.begin,
                    scores + block.begin, blocks.row, false);
    for (int64_t i = 0; i < count; i++) {
      float* row = scores + i * blocks.row;
      fetch_row<T>(next, q0 + i, s, {q}, {k, v});
      const Range range = blocks.range_of(q0 + i, block);
      add_bias(s, item, q0 + i, range, row);
      const Softmax softmax = exponentiate(row, range, s.scale);
      lse[(first_row + i) * s.num_heads + item.head] = softmax.log_sum;
      draw_factors(s, item, q0 + i, block, factors);
      for (int64_t b = block.begin; b < block.end; b += kNR)
#pragma omp simd
        for (int64_t j = b; j < b + kNR; j++) row[j] *= softmax.factor * factors[j];
    }
    multiply_packed({scores + block.begin, blocks.row, 1}, count, block.last - block.begin, values + block.begin * kNR,
                    num_k, s.width, result, width, false);
    store_rows(result, width, count, s.width, out.at(first_row, item.head, s.width), out.row);
  }
}

struct BackwardMemory {
  Scratch keys, values, right, left, left_dout, scores, dscores, dq, dk, dv, factors;
};

template <class T>
void backward_item(const Sequences& s, const Item& item, const Item* next, Heads<const T> dout, Heads<const T> q, Heads<const T> k,
                   Heads<const T> v, const float* lse, Heads<T> dq, Heads<T> dk, Heads<T> dv, float* dbias,
                   BackwardMemory& memory) {
  const Blocks blocks(s, item);
  const int64_t width = padded(s.width), num_k = item.num_k;
  const T* k_data = k.at(item.k_first, item.head, s.width);
  float* keys = memory.keys.at_least(blocks.row * s.width);      // right-hand side of q k'
  float* values = memory.values.at_least(blocks.row * s.width);  // of dout v'
  float* right = memory.right.at_least(width * std::max(num_k, blocks.num_queries));
  float* scores = memory.scores.at_least(blocks.num_queries * blocks.row);
  float* dscores = memory.dscores.at_least(blocks.num_queries * blocks.row);
  float* block_dq = memory.dq.at_least(blocks.num_queries * width);
  float* sum_dk = memory.dk.at_least(num_k * width);
  float* sum_dv = memory.dv.at_least(num_k * width);
  float* factors = memory.factors.at_least(blocks.row);
  std::fill(factors, factors + blocks.row, 1.0f);
  const bool adds = item.num_q > blocks.num_queries || blocks.windowed();  // else the one block sees every key
  if (adds || item.num_q == 0) {
    std::fill(sum_dk, sum_dk + num_k * width, 0.0f);
    std::fill(sum_dv, sum_dv + num_k * width, 0.0f);
  }
  pack_panels<kNR>(Lines<T>{k_data, k.row, 1}, num_k, s.width, keys, kNR * s.width);
  pack_panels<kNR>(Lines<T>{v.at(item.k_first, item.head, s.width), v.row, 1}, num_k, s.width, values, kNR * s.width);
  for (int64_t q0 = 0; q0 < item.num_q; q0 += blocks.num_queries) {
    const int64_t count = std::min(blocks.num_queries, item.num_q - q0), first_row = item.q_first + q0;
    const Range block = blocks.range_of(q0, q0 + count - 1);
    const int64_t num_seen = block.last - block.begin, num_columns = block.end - block.begin;
    const T *q_data = q.at(first_row, item.head, s.width), *dout_data = dout.at(first_row, item.head, s.width);
    multiply_packed(left_rows(q_data, q.row, count, s.width, memory.left), count, s.width,
                    keys + block.begin * s.width, s.width, num_columns, scores + block.begin, blocks.row, false);
    multiply_packed(left_rows(dout_data, dout.row, count, s.width, memory.left_dout), count, s.width,
                    values + block.begin * s.width, s.width, num_columns, dscores + block.begin, blocks.row, false);
    for (int64_t i = 0; i < count; i++) {
      float *p = scores + i * blocks.row, *d = dscores + i * blocks.row;
      fetch_row<T>(next, q0 + i, s, {q, dout}, {k, v});
      const Range range = blocks.range_of(q0 + i, block);
      const float log_sum = lse[(first_row + i) * s.num_heads + item.head], scale = s.scale;
      draw_factors(s, item, q0 + i, block, factors);
      add_bias(s, item, q0 + i, range, p);
      range.hide(p, kHidden);
      float dot = 0.0f;
      for (int64_t b = block.begin; b < block.end; b += kNR)
#pragma omp simd reduction(+ : dot)
        for (int64_t j = b; j < b + kNR; j++) {
          p[j] = exp_f(p[j] * scale - log_sum);
          d[j] *= factors[j];
          dot += p[j] * d[j];
        }
      for (int64_t b = block.begin; b < block.end; b += kNR)
#pragma omp simd
        for (int64_t j = b; j < b + kNR; j++) {
          d[j] = p[j] * (d[j] - dot) * scale;
          p[j] *= factors[j];  // as they met the values
        }
      if (dbias) {
        float* sum = dbias + s.bias.distances / 2 - (q0 + i);
#pragma omp simd
        for (int64_t j = range.first; j < range.last; j++) sum[j] += d[j];
      }
    }
    const Left p_transposed{scores + block.begin, 1, blocks.row}, d_transposed{dscores + block.begin, 1, blocks.row};
    pack_panels<kNR>(Lines<T>{dout_data, 1, dout.row}, s.width, count, right, kNR * count);
    multiply_packed(p_transposed, num_seen, count, right, count, s.width, sum_dv + block.begin * width, width, adds);
    pack_panels<kNR>(Lines<T>{q_data, 1, q.row}, s.width, count, right, kNR * count);
    multiply_packed(d_transposed, num_seen, count, right, count, s.width, sum_dk + block.begin * width, width, adds);
    pack_panels<kNR>(Lines<T>{k_data + block.begin * k.row, 1, k.row}, s.width, num_seen, right, kNR * num_seen);
    multiply_packed({dscores + block.begin, blocks.row, 1}, count, num_seen, right, num_seen, s.width, block_dq, width,
                    false);
    store_rows(block_dq, width, count, s.width, dq.at(first_row, item.head, s.width), dq.row);
  }
  store_rows(sum_dk, width, num_k, s.width, dk.at(item.k_first, item.head, s.width), dk.row);
  store_rows(sum_dv, width, num_k, s.width, dv.at(item.k_first, item.head, s.width), dv.row);
}

// Calls of(item, the item that this thread probably takes next or null, the thread's memory) for all items.
template <class Memory, class F>
void over_items(const Sequences& s, F&& of) {
  const std::vector<Item> items = items_of(s);
  const size_t at_once = items_at_once(items.size());
#pragma omp parallel
  {
    static thread_local Memory memory;
#pragma omp for schedule(dynamic, 1)
    for (size_t first = 0; first < items.size(); first += at_once)
      for (size_t i = first; i < std::min(items.size(), first + at_once); i++)
        of(items[i], i + 1 < items.size() ? &items[i + 1] : nullptr, memory);
  }
}

}  // namespace

template <class T>
void attention_forward(const Sequences& s, Heads<const T> q, Heads<const T> k, Heads<const T> v, Heads<T> out,
                       float* lse) {
  over_items<ForwardMemory>(s, [&](const Item& item, const Item* next, ForwardMemory& memory) {
    forward_item(s, item, next, q, k, v, out, lse, memory);
  });
}

template <class T>
void attention_backward(const Sequences& s, Heads<const T> dout, Heads<const T> q, Heads<const T> k, Heads<const T> v,
                        const float* lse, Heads<T> dq, Heads<T> dk, Heads<T> dv, float* dbias) {
  // A sum for each item: which thread computes which, and when, makes no difference.
  const int64_t distances = dbias ? s.bias.distances : 0, columns = s.num_heads * distances;
  std::vector<float> sums(size_t(s.count * columns), 0.0f);
  over_items<BackwardMemory>(s, [&](const Item& item, const Item* next, BackwardMemory& memory) {
    float* own = dbias ? sums.data() + item.sequence * columns + item.head * distances : nullptr;
    backward_item(s, item, next, dout, q, k, v, lse, dq, dk, dv, own, memory);
  });
  std::fill(dbias, dbias + columns, 0.0f);
  for (int64_t i = 0; i < s.count; i++)
#pragma omp simd
    for (int64_t j = 0; j < columns; j++) dbias[j] += sums[i * columns + j];
}

#define FLEETUNE_ATTENTION(T)                                                                                      \
  template void attention_forward<T>(const Sequences&, Heads<const T>, Heads<const T>, Heads<const T>, Heads<T>, \
                                     float*);                                                                     \
  template void attention_backward<T>(const Sequences&, Heads<const T>, Heads<const T>, Heads<const T>,          \
                                      Heads<const T>, const float*, Heads<T>, Heads<T>, Heads<T>, float*);
FLEETUNE_ATTENTION(float)
FLEETUNE_ATTENTION(bf16)

}  // namespace fleetune
