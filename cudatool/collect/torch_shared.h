// What torch_log.cpp and torch_blocks.cpp have in common.

#pragma once

#include <torch/csrc/autograd/function.h>

#include <cstring>
#include <typeinfo>
#include <utility>

#include "_log_exports.h"

namespace {

// Whether a node of the backward graph is a function that is written in Python: Node::name() takes the GIL for it.
bool is_of_python(const torch::autograd::Node& node) {
  return !std::strcmp(typeid(node).name(), "N5torch8autograd6PyNodeE");
}

// Which pool a block is of: PyTorch tells from 2.8 on.
template <typename Entry>
std::pair<uint64_t, uint64_t> pool_of(const Entry& entry) {
  if constexpr (requires { entry.mempool_; }) return {entry.mempool_.first, entry.mempool_.second};
  return {0, 0};
}

}  // namespace
