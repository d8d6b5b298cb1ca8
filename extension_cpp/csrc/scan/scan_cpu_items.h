/* Loops of scans over work items, lines and parts of lines (defined in scan.h). */
#ifndef EXTENSION_CPP_SCAN_CPU_ITEMS_H
#define EXTENSION_CPP_SCAN_CPU_ITEMS_H

#include <string.h>

#include "scan/scan.h"
#include "scan/scan_cpu.h"

/* ---- narrow lines: rows of few steps, and few columns, are scanned element by element ---- */

enum { SCAN_NARROW = 8, SCAN_SHORT = 16 };

/* Returns whether lines are narrow. A work item is then one outer index with all its lines. */
ALWAYS_INLINE int scan_is_narrow(const scan_shape *shape) {
  if (shape->inner == 1) return shape->length <= SCAN_SHORT;
  return shape->inner <= SCAN_NARROW && shape->length <= SCAN_PART;
}

/* ---- work items ---- */

/* A work item, and the part of its lines that is being scanned. */
typedef struct {
  const scan_shape *shape;
  int64_t outer, inner; /* indices of the first line */
  int width;            /* number of lines */
  int lanes;            /* entries of scan_state_t in use: 1 for a row, whole blocks for a tile */
  int64_t part;         /* index of the item's first part in the line */
  int64_t first, steps; /* the first step of the current part, and its number of steps */
  int is_last;          /* whether the current part is the last one of the line */
} scan_item_t;

ALWAYS_INLINE scan_item_t scan_item(const scan_shape *shape, int64_t item) {
  const scan_cpu_plan *plan = (const scan_cpu_plan *)shape->state;
  const int64_t tiles = ceil_div(shape->inner, plan->width), tile = item / plan->parts;
  scan_item_t found = {.shape = shape};
  found.outer = tile / tiles;
  found.inner = tile % tiles * plan->width;
  found.part = item % plan->parts;
  return found;
}

/* Moves `item` on to the next work item. */
ALWAYS_INLINE void next_item(const scan_shape *shape, scan_item_t *item) {
  const scan_cpu_plan *plan = (const scan_cpu_plan *)shape->state;
  if (++item->part < plan->parts) return;
  item->part = 0;
  item->inner += plan->width;
  if (item->inner < shape->inner) return;
  item->inner = 0;
  ++item->outer;
}

/* Returns the sum of the jumps of operand `index` before an outer index. The function is marked as
 * rare and not inlined, so that calls without jumps keep their registers. If it were inlined, scans
 * of short lines would take up to a third longer. */
NOINLINE __attribute__((cold)) int64_t scan_jumps(const scan_shape *shape, int64_t outer,
                                                  int64_t index) {
  int64_t sum = 0;
  for (int64_t j = 0; j < shape->jump_count; ++j)
    sum += outer / shape->jumps[j].span * shape->jumps[j].by[index];
  return sum;
}

/* Returns the offset, in elements, at which the current part of an item begins in operand `index`.
 * The strides are those of this operand. */
ALWAYS_INLINE int64_t scan_offset(const scan_item_t *item, int64_t outer, int64_t inner,
                                  int64_t step, int64_t index) {
  const int64_t offset = item->outer * outer + item->inner * inner + item->first * step;
  const int has_jumps = item->shape->jump_count > 0;
  return has_jumps ? offset + scan_jumps(item->shape, item->outer, index) : offset;
}

/* Two numbers for each line of a work item. */
typedef struct {
  double a[SCAN_TILE], b[SCAN_TILE];
} scan_state_t;

/* The functions of an op. start() sets the state before the first step. part() scans a part from a
 * given state, and computes the part's total, which does not depend on that state. join() replaces
 * the state before a part by the state after it, given the part's total. */
typedef struct {
  void (*start)(const void *args, const scan_item_t *item, scan_state_t *state);
  void (*part)(const void *args, const scan_item_t *item, const scan_state_t *state,
               scan_state_t *total, int only_total);
  void (*join)(scan_state_t *state, const double *a, const double *b, int lanes);
} scan_op_t;

static void scan_run(scan_op_t op, const void *args, const scan_shape *shape, int64_t steps,
                     int64_t begin, int64_t end, int only_total) {
  const scan_cpu_plan *plan = (const scan_cpu_plan *)shape->state;
  const int64_t lines = scan_lines(shape), lines_inside = lines / shape->outer;
  const int64_t parts = steps > 0 ? ceil_div(steps, SCAN_PART) : 1;
  scan_state_t state, total;
  scan_item_t item = scan_item(shape, begin);
  for (int64_t i = begin; i < end; ++i, next_item(shape, &item)) {
    const int64_t rest_inside = shape->inner - item.inner;
    item.width = (int)(rest_inside < plan->width ? rest_inside : plan->width);
    item.lanes = shape->inner == 1 ? 1 : (item.width + BLOCK - 1) / BLOCK * BLOCK;
    double *totals = plan->totals + item.outer * lines_inside + item.inner;
    if (i == begin || item.part == 0) {
      op.start(args, &item, &state);
      for (int64_t part = 0; part < item.part && !only_total; ++part)
        op.join(&state, totals + 2 * part * lines, totals + (2 * part + 1) * lines, item.lanes);
    }
    const int64_t parts_end = plan->parts > 1 ? item.part + 1 : parts;
    for (int64_t part = item.part; part < parts_end; ++part) {
      const int64_t rest = steps - part * SCAN_PART;
      item.first = part * SCAN_PART;
      item.steps = rest < SCAN_PART ? rest : SCAN_PART;
      item.is_last = rest <= SCAN_PART;
      op.part(args, &item, &state, &total, only_total);
      if (only_total) {
        const size_t size = (size_t)item.lanes * sizeof(double);
        memcpy(totals + 2 * part * lines, total.a, size);
        memcpy(totals + (2 * part + 1) * lines, total.b, size);
      } else if (!item.is_last) {
        op.join(&state, total.a, total.b, item.lanes);
      }
    }
  }
}

static void join_sums(scan_state_t *state, const double *a, const double *b, int lanes) {
  (void)b;
  for (int k = 0; k < lanes; ++k) state->a[k] += a[k];
}

/* For a recurrence, the state is state.a, and a total is the pair (a, b). */
static void join_pairs(scan_state_t *state, const double *a, const double *b, int lanes) {
  for (int k = 0; k < lanes; ++k) state->a[k] = next_state((pair_sum_t){a[k], b[k]}, state->a[k]);
}

static void join_exp_sums(scan_state_t *state, const double *a, const double *b, int lanes) {
  for (int k = 0; k < lanes; ++k) {
    const exp_sum_t before = {state->a[k], state->b[k]};
    const exp_sum_t joined = add_exp_sums(before, (exp_sum_t){a[k], b[k]});
    state->a[k] = joined.max;
    state->b[k] = joined.sum;
  }
}

#endif
