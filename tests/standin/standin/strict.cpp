// SPDX-License-Identifier: Apache-2.0
// A backend of torch for the stand-in device, as asynchronous and as unforgiving as NCCL. Gloo moves the bytes.
// What it emulates is listed in the docstring of standin/__init__.py.

#include "standin.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <thread>

namespace {

using at::Tensor;
using c10d::OpType;
using standin::PendingPtr;
using Clock = std::chrono::steady_clock;
using Millis = std::chrono::milliseconds;
using InnerWorks = std::vector<c10::intrusive_ptr<c10d::Work>>;
// One communication on the CPU, in a worker thread: what it starts without waiting for it goes into the list.
using Step = std::function<void(c10d::Backend&, InnerWorks&)>;
using Tensors = std::vector<Tensor>;

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr Millis kForever = std::chrono::hours(24);
constexpr Millis kWatchdogPeriod{100};
constexpr Millis kShutdown = std::chrono::seconds(30);
constexpr int kCollectives = -1;  // The number of a communicator's own lane; others have the number of a peer.

// -- one order --------------------------------------------------------------------------------------------

std::mutex& counts_lock = *new std::mutex;
std::map<int64_t, int64_t>& counts_with = *new std::map<int64_t, int64_t>;  // Collectives issued so far on communicators that have this rank of the world.

[[noreturn]] void end_process(const std::string& why) {
  std::fprintf(stderr, "strict stand-in: %s\n", why.c_str());
  std::fflush(stderr);
  std::abort();
}

// -- communicators ----------------------------------------------------------------------------------------

struct Job {
  PendingPtr pending;
  std::vector<Step> steps;
  std::vector<int64_t> header;  // Empty where only some ranks take part: not compared.
  std::string name;
};

struct Lane {
  std::deque<Job> jobs;
  c10::Stream stream;
};

struct Outstanding {
  PendingPtr pending;
  Clock::time_point queued;
  std::string name;
};

struct Communicator : std::enable_shared_from_this<Communicator> {
  c10::intrusive_ptr<c10d::Backend> inner;
  std::string name;
  std::vector<int64_t> ranks;  // In the world.
  int rank = 0;
  Millis timeout{0};

  std::mutex lock;
  std::condition_variable changed;
  std::map<int, std::shared_ptr<Lane>> lanes;
  std::vector<Outstanding> outstanding;
  bool has_ended = false;
  std::string aborted_because;

  std::string where() const { return "rank " + std::to_string(rank) + ", communicator " + name; }

  void check_alive() {
    std::lock_guard<std::mutex> guard(lock);
    if (!aborted_because.empty()) C10_THROW_ERROR(DistBackendError, aborted_because);
  }

  void issue(Job job, int number, c10::DeviceIndex device) {
    std::lock_guard<std::mutex> guard(lock);
    if (!aborted_because.empty()) C10_THROW_ERROR(DistBackendError, aborted_because);
    std::erase_if(outstanding, [](const auto& one) { return one.pending->is_finished(); });
    outstanding.push_back({job.pending, Clock::now(), job.name});
    auto& lane = lanes[number];
    if (!lane) {
      lane = std::make_shared<Lane>(Lane{{}, standin::new_stream(device)});
      std::thread([self = shared_from_this(), lane] { self->work_on(*lane); }).detach();
    }
    standin::order_after(lane->stream, job.pending);
    lane->jobs.push_back(std::move(job));
    changed.notify_all();
  }

  c10::Stream stream_of(int number) {
    std::lock_guard<std::mutex> guard(lock);
    return lanes.at(number)->stream;
  }

  void work_on(Lane& lane) {
    while (true) {
      Job job;
      {
        std::unique_lock<std::mutex> guard(lock);
        changed.wait(guard, [&] { return has_ended || !aborted_because.empty() || !lane.jobs.empty(); });
        if (!aborted_because.empty() || lane.jobs.empty()) return;
        job = std::move(lane.jobs.front());
        lane.jobs.pop_front();
      }
      bool is_done = false;
      try {
        is_done = compare(job);
        InnerWorks started;
        if (is_done)
          for (const auto& step : job.steps) step(*inner, started);
        for (const auto& work : started) work->wait(kForever);
      } catch (const std::exception& error) {
        is_done = false;
        if (std::getenv("STANDIN_VERBOSE")) std::fprintf(stderr, "strict stand-in: %s: %s\n", where().c_str(), error.what());
      }
      if (is_done) {
        job.pending->finish(false);
        std::lock_guard<std::mutex> guard(lock);
        changed.notify_all();
        continue;
      }
      // NCCL does not notice that a peer is dead, or that it does something else: the collective never ends.
      std::unique_lock<std::mutex> guard(lock);
      changed.wait(guard, [&] { return !aborted_because.empty(); });
      return;
    }
  }

  // Return whether all ranks do the same; end the process where their orders differ.
  bool compare(const Job& job) {
    if (job.header.empty() || ranks.size() == 1) return true;
    auto options = at::TensorOptions(at::kLong);
    auto own = at::empty({static_cast<int64_t>(job.header.size())}, options);
    std::memcpy(own.data_ptr(), job.header.data(), own.nbytes());
    Tensors given{own};
    std::vector<Tensors> taken(1);
    for (size_t peer = 0; peer < ranks.size(); ++peer) taken[0].push_back(at::empty_like(own));
    inner->allgather(taken, given)->wait(kForever);
    for (size_t peer = 0; peer < ranks.size(); ++peer) {
      const auto* header = taken[0][peer].const_data_ptr<int64_t>();
      if (header[1 + rank] != job.header[1 + peer])
        end_process(where() + ": " + job.name + " is number " + std::to_string(job.header[1 + peer]) +
                    " of the collectives issued here with rank " + std::to_string(ranks[peer]) +
                    " of the world, and number " + std::to_string(header[1 + rank]) +
                    " there: ranks issue collectives of several communicators in different orders");
      if (header[0] != job.header[0]) return false;
    }
    return true;
  }

  void abort(const std::string& reason) {
    std::vector<Outstanding> all;
    {
      std::lock_guard<std::mutex> guard(lock);
      if (!aborted_because.empty()) return;
      aborted_because = reason;
      all.swap(outstanding);
      for (auto& [_, lane] : lanes) lane->jobs.clear();
      changed.notify_all();
    }
    for (const auto& one : all) one.pending->finish(true);
    // Closing Gloo's connections may block where peers are gone, and is of no use but to end worker threads.
    std::thread([inner = inner] {
      try {
        inner->abort();
      } catch (const std::exception&) {
      }
    }).detach();
  }

  void end(bool waits) {
    std::unique_lock<std::mutex> guard(lock);
    if (waits) {
      auto is_idle = [this] {
        std::erase_if(outstanding, [](const auto& one) { return one.pending->is_finished(); });
        return outstanding.empty() || !aborted_because.empty();
      };
      if (!changed.wait_for(guard, kShutdown, is_idle)) {
        guard.unlock();
        abort("NCCL would hang here: destroyed with collectives pending on " + where());
        guard.lock();
      }
    }
    has_ended = true;
    changed.notify_all();
  }

  void look_for_overdue() {
    std::lock_guard<std::mutex> guard(lock);
    if (!aborted_because.empty()) return;
    for (const auto& one : outstanding)
      if (!one.pending->is_finished() && Clock::now() - one.queued >= timeout)
        end_process("watchdog: " + where() + ": " + one.name + " is not complete " + std::to_string(timeout.count()) +
                    " ms after it was queued; the process is ended, as torch does by default with NCCL");
  }
};

// Threads outlive the end of main: what they use is never destroyed.
std::mutex& communicators_lock = *new std::mutex;
std::vector<std::weak_ptr<Communicator>>& communicators = *new std::vector<std::weak_ptr<Communicator>>;

void watch_over(const std::shared_ptr<Communicator>& communicator) {
  std::lock_guard<std::mutex> guard(communicators_lock);
  std::erase_if(communicators, [](const auto& one) { return one.expired(); });
  communicators.push_back(communicator);
  static bool is_watching = false;
  if (!std::exchange(is_watching, true)) {
    std::thread([] {
      while (true) {
        std::this_thread::sleep_for(kWatchdogPeriod);
        std::vector<std::shared_ptr<Communicator>> all;
        {
          std::lock_guard<std::mutex> guard(communicators_lock);
          for (const auto& one : communicators)
            if (auto found = one.lock()) all.push_back(found);
        }
        for (const auto& one : all) one->look_for_overdue();
      }
    }).detach();
  }
}

// -- works ------------------------------------------------------------------------------------------------

struct StrictWork final : c10d::Work {
  StrictWork(int rank, OpType type, std::shared_ptr<Communicator> of)
      : c10d::Work(rank, type), communicator(std::move(of)), pending(std::make_shared<standin::Pending>()) {}

  bool isCompleted() override { return pending->is_finished(); }
  bool isSuccess() const override {
    std::lock_guard<std::mutex> guard(pending->lock);
    return pending->finished && !pending->failed;
  }
  std::exception_ptr exception() const override {
    {
      std::lock_guard<std::mutex> guard(pending->lock);
      if (!pending->failed) return nullptr;
    }
    try {
      communicator->check_alive();
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }
  void synchronize() override { standin::order_after(standin::current_stream(device), pending); }
  bool wait(Millis limit) override {
    synchronize();
    if (limit.count() > 0) {
      standin::host_waits("Work.wait with a timeout");
      standin::OutsidePython outside;
      std::unique_lock<std::mutex> guard(pending->lock);
      const bool is_there = pending->changed.wait_until(guard, queued + limit, [this] { return pending->finished; });
      guard.unlock();
      if (!is_there)
        communicator->abort("Work " + name + " timed out in blocking wait, " + std::to_string(limit.count()) +
                            " ms after it was queued: the communicator was aborted (" + communicator->where() + ")");
    } else if (opType_ == OpType::BARRIER) {
      standin::host_waits("barrier");
      standin::settle_current(device);
    }
    if (auto error = exception()) std::rethrow_exception(error);
    return true;
  }
  void blockCurrentStream() override { synchronize(); }
  void abort() override { communicator->abort("aborted by Work.abort() (" + communicator->where() + ")"); }
  std::vector<Tensor> result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }

  std::shared_ptr<Communicator> communicator;
  PendingPtr pending;
  Tensors outputs;
  Clock::time_point queued;
  std::string name;
  c10::DeviceIndex device = 0;
  c10::intrusive_ptr<c10::ivalue::Future> future;
};

// -- tensors ----------------------------------------------------------------------------------------------

// The device's memory as the CPU sees it, in one dimension.
Tensor seen(const Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), {tensor.numel()}, at::TensorOptions(tensor.scalar_type()));
}

Tensor copied(const Tensor& tensor) { return seen(tensor).clone(); }

Tensor bytes(const Tensor& flat) { return flat.view(at::kByte); }

Tensor new_bytes(int64_t number) { return at::empty({number}, at::TensorOptions(at::kByte)); }

int64_t size_of(const Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

void poison(const Tensor& tensor) {
  if (tensor.numel() == 0) return;
  auto flat = seen(tensor);
  switch (tensor.scalar_type()) {
    case at::kChar: flat.fill_(std::numeric_limits<int8_t>::lowest()); break;
    case at::kInt: flat.fill_(std::numeric_limits<int32_t>::lowest()); break;
    case at::kLong: flat.fill_(std::numeric_limits<int64_t>::lowest()); break;
    case at::kBool: flat.fill_(true); break;
    default: std::memset(tensor.data_ptr(), 0xff, tensor.nbytes());  // NaN, for floating-point numbers of any size.
  }
}

void bring(const Tensor& output, const Tensor& result) {
  // FSDP takes the memory away from tensors that it no longer needs.
  if (output.numel() && output.storage().nbytes() >= (output.storage_offset() + output.numel()) * output.itemsize())
    std::memcpy(output.data_ptr(), result.data_ptr(), output.nbytes());
}

struct Reduction {
  c10d::ReduceOp::RedOpType type;
  double factor = 1.0;
};

Reduction reduction_of(const c10d::ReduceOp& op) {
  Reduction found{op.op_};
  TORCH_CHECK(found.type != c10d::ReduceOp::BAND && found.type != c10d::ReduceOp::BOR &&
                  found.type != c10d::ReduceOp::BXOR, "NCCL has no bitwise reductions");
  if (found.type == c10d::ReduceOp::PREMUL_SUM) {
    const auto* more = static_cast<const c10d::PreMulSumSupplement*>(op.supplement_.get());
    found.factor = more->tensor_factor.defined() ? more->tensor_factor.item<double>() : more->double_factor;
  }
  return found;
}

void reduce_now(c10d::Backend& inner, const Tensor& flat, Reduction how) {
  if (flat.numel() == 0) return;
  auto tensor = flat.is_complex() ? at::view_as_real(flat).view(-1) : flat;
  c10d::AllreduceOptions options;
  options.timeout = kForever;
  if (how.type == c10d::ReduceOp::PREMUL_SUM) tensor.mul_(how.factor);
  const bool sums = how.type == c10d::ReduceOp::PREMUL_SUM || how.type == c10d::ReduceOp::AVG;
  options.reduceOp = sums ? c10d::ReduceOp::SUM : how.type;
  if (tensor.scalar_type() == at::kBool) {
    tensor = bytes(tensor);
    if (how.type == c10d::ReduceOp::SUM) options.reduceOp = c10d::ReduceOp::MAX;
  }
  Tensors all{tensor};
  inner.allreduce(all, options)->wait(kForever);
  if (how.type == c10d::ReduceOp::AVG) tensor.div_(inner.getSize(), at::isIntegralType(tensor.scalar_type(), true) ? "trunc" : std::optional<c10::string_view>());
}

void broadcast_now(c10d::Backend& inner, const Tensor& flat, int root) {
  if (flat.numel() == 0) return;
  c10d::BroadcastOptions options;
  options.timeout = kForever;
  options.rootRank = root;
  Tensors all{flat};
  inner.broadcast(all, options)->wait(kForever);
}

void gather_now(c10d::Backend& inner, const Tensor& own, const Tensor& all) {
  if (own.numel() == 0) return;
  c10d::AllgatherOptions options;
  options.timeout = kForever;
  Tensors given{own};
  std::vector<Tensors> taken{all.chunk(inner.getSize())};
  inner.allgather(taken, given, options)->wait(kForever);
}

// -- the backend ------------------------------------------------------------------------------------------

struct Strict final : c10d::Backend {
  // What one call, or all calls between startCoalescing and endCoalescing, send and receive.
  struct Batch {
    c10::intrusive_ptr<StrictWork> work;
    std::vector<Step> steps;
    std::vector<std::pair<Tensor, Tensor>> results;  // On the device; on the CPU.
    int64_t signature = 0;
    bool is_collective = false;
    int lane = kCollectives;
    bool is_empty = true;
  };

  Strict(const std::shared_ptr<Communicator>& of, int rank, int size) : c10d::Backend(rank, size), own(of) {}
  ~Strict() override { own->end(false); }

  const std::string getBackendName() const override { return "strict"; }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>("strict", own->timeout);
  }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(Millis timeout) override { own->timeout = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence; }
  c10d::ErrorType getError() override {
    std::lock_guard<std::mutex> guard(own->lock);
    return own->aborted_because.empty() ? c10d::ErrorType::SUCCESS : c10d::ErrorType::COMM_ERROR;
  }
  void abort() override { own->abort("NCCL communicator was aborted on " + own->where()); }
  void shutdown() override { own->end(true); }

  // -- how calls are issued --

  c10::DeviceIndex device() {
    if (device_index < 0) {
      auto bound = getBoundDeviceId();
      device_index = bound ? bound->index() : c10::impl::VirtualGuardImpl(kType).getDevice().index();
    }
    return device_index;
  }

  void check(const Tensors& tensors, bool is_p2p = false) {
    own->check_alive();
    for (const auto& tensor : tensors) {
      TORCH_CHECK_VALUE(tensor.device().type() == kType && !tensor.is_sparse(),
                        "Tensors must be on the stand-in device and dense, not on ", tensor.device());
      TORCH_CHECK_VALUE(tensor.device().index() == device(), "communicator ", own->name, " belongs to stand-in device ",
                        int(device()), ", and a tensor is on ", tensor.device());
      TORCH_CHECK_VALUE(is_p2p || tensor.is_contiguous(tensor.suggest_memory_format()), "Tensors must be contiguous");
      switch (tensor.scalar_type()) {
        case at::kChar: case at::kByte: case at::kFloat: case at::kDouble: case at::kInt: case at::kLong:
        case at::kHalf: case at::kBool: case at::kBFloat16: case at::kComplexFloat: case at::kComplexDouble:
        case at::kFloat8_e5m2: case at::kFloat8_e4m3fn:
          break;
        default:
          TORCH_CHECK_TYPE(false, "Input tensor data type is not supported for NCCL: ", tensor.scalar_type());
      }
    }
    standin::settle_current(device());
  }

  Batch new_batch(OpType type) {
    Batch batch;
    batch.work = c10::make_intrusive<StrictWork>(getRank(), type, own);
    batch.work->device = device();
    return batch;
  }

  // Call after the inputs were copied: the outputs may be the same tensors.
  c10::intrusive_ptr<c10d::Work> add(OpType type, int64_t num_bytes, const std::vector<std::pair<Tensor, Tensor>>& results,
                                     Step step, int lane = kCollectives) {
    c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
    for (const auto& [output, _] : results) poison(output);
    Batch single;
    if (!batch) single = new_batch(type);
    auto& into = batch ? *batch : single;
    into.steps.push_back(std::move(step));
    into.results.insert(into.results.end(), results.begin(), results.end());
    into.signature = (into.signature * 1000003 + static_cast<int64_t>(type)) * 1000003 + num_bytes;
    into.is_collective = into.is_collective || lane == kCollectives;
    into.is_empty = false;
    if (!into.work->name.empty()) into.work->name += "+";
    into.work->name += c10d::opTypeToString(type);
    if (batch) return into.work;
    into.lane = lane;
    return issue(into);
  }

  c10::intrusive_ptr<c10d::Work> issue(Batch& given) {
    auto work = given.work;
    Job job{work->pending, std::move(given.steps), {}, work->name};
    if (given.is_collective) {
      std::lock_guard<std::mutex> guard(counts_lock);
      ++sequence;
      job.header.push_back(given.signature);
      for (auto peer : own->ranks) job.header.push_back(counts_with[peer]++);
      job.name += " number " + std::to_string(sequence);
    }
    for (const auto& [output, _] : given.results) work->outputs.push_back(output);
    work->pending->deliver = [results = given.results] {
      for (const auto& [output, result] : results) bring(output, result);
    };
    work->queued = Clock::now();
    own->issue(std::move(job), given.lane, device());
    auto list = c10::ListType::create(c10::TensorType::get());
    work->future = c10::make_intrusive<c10::ivalue::Future>(list, std::vector<c10::Device>{c10::Device(kType, device())});
    c10::StreamGuard guard(own->stream_of(given.lane));
    work->future->markCompleted(c10::IValue(work->outputs));
    return work;
  }

  void startCoalescing() override {
    own->check_alive();
    batch = new_batch(OpType::COALESCED);
  }

  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    TORCH_CHECK(batch, "endCoalescing without startCoalescing");
    auto all = std::move(*batch);
    batch.reset();
    if (all.is_empty) all.work->pending->finish(false);
    if (all.is_empty) return all.work;
    return issue(all);
  }

  // -- collectives --

  c10::intrusive_ptr<c10d::Work> reduce_all(OpType type, const Tensors& inputs, const Tensors& outputs,
                                            const c10d::ReduceOp& op, bool has_part, bool brings = true) {
    check(inputs);
    check(outputs);
    auto how = reduction_of(op);
    const auto rank = getRank(), size = getSize();
    std::vector<std::pair<Tensor, Tensor>> results;
    Tensors flats;
    int64_t total = 0;
    for (size_t number = 0; number < inputs.size(); ++number) {
      flats.push_back(copied(inputs[number]));
      total += size_of(inputs[number]);
      if (has_part)
        TORCH_CHECK_VALUE(inputs[number].numel() == outputs[number].numel() * size,
                          "input tensor must be the same size as output size times world size");
      auto part = has_part ? flats.back().narrow(0, rank * outputs[number].numel(), outputs[number].numel()) : flats.back();
      if (brings) results.emplace_back(outputs[number], part);
    }
    return add(type, total, results, [flats, how](c10d::Backend& inner, InnerWorks&) {
      for (const auto& flat : flats) reduce_now(inner, flat, how);
    });
  }

  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return reduce_all(OpType::ALLREDUCE, tensors, tensors, options.reduceOp, false);
  }
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(Tensors& tensors,
                                                     const c10d::AllreduceCoalescedOptions& options) override {
    return reduce_all(OpType::ALLREDUCE_COALESCED, tensors, tensors, options.reduceOp, false);
  }
  c10::intrusive_ptr<c10d::Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return reduce_all(OpType::REDUCE, tensors, tensors, options.reduceOp, false, options.rootRank == getRank());
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(Tensor& output, Tensor& input,
                                                      const c10d::ReduceScatterOptions& options) override {
    return reduce_all(OpType::_REDUCE_SCATTER_BASE, {input}, {output}, options.reduceOp, true);
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                 const c10d::ReduceScatterOptions& options) override {
    return reduce_all(OpType::REDUCE_SCATTER_TENSOR_COALESCED, inputs, outputs, options.reduceOp, true);
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                const c10d::ReduceScatterOptions& options) override {
    check(inputs.at(0));
    check(outputs);
    auto how = reduction_of(options.reduceOp);
    Tensors flats;
    for (const auto& one : inputs.at(0)) flats.push_back(copied(one));
    return add(OpType::REDUCE_SCATTER, 0, {{outputs.at(0), flats.at(getRank())}},
               [flats, how](c10d::Backend& inner, InnerWorks&) {
                 for (const auto& flat : flats) reduce_now(inner, flat, how);
               });
  }

  c10::intrusive_ptr<c10d::Work> gather_all(OpType type, const Tensors& inputs, const std::vector<Tensors>& outputs) {
    check(inputs);
    std::vector<std::pair<Tensor, Tensor>> results;
    std::vector<std::pair<Tensor, Tensor>> moves;
    int64_t total = 0;
    for (size_t number = 0; number < inputs.size(); ++number) {
      const auto each = size_of(inputs[number]);
      auto all = new_bytes(each * getSize());
      moves.emplace_back(bytes(copied(inputs[number])), all);
      total += each;
      if (outputs.empty()) continue;
      check(outputs[number]);
      const auto count = static_cast<int64_t>(outputs[number].size());
      TORCH_CHECK_VALUE(count == getSize() || (count == 1 && size_of(outputs[number][0]) == each * getSize()),
                        "the outputs of an all-gather must hold world_size times its input");
      for (int64_t part = 0; part < count; ++part)
        results.emplace_back(outputs[number][part], all.narrow(0, part * (all.numel() / count), all.numel() / count));
    }
    return add(type, total, results, [moves](c10d::Backend& inner, InnerWorks&) {
      for (const auto& [own, all] : moves) gather_now(inner, own, all);
    });
  }

  c10::intrusive_ptr<c10d::Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                           const c10d::AllgatherOptions&) override {
    return gather_all(OpType::ALLGATHER, inputs, outputs);
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(Tensor& output, Tensor& input,
                                                 const c10d::AllgatherOptions&) override {
    return gather_all(OpType::_ALLGATHER_BASE, {input}, {{output}});
  }
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                 const c10d::AllgatherOptions&) override {
    std::vector<Tensors> each;
    for (const auto& output : outputs) each.push_back({output});
    return gather_all(OpType::COALESCED, inputs, each);
  }
  c10::intrusive_ptr<c10d::Work> gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                        const c10d::GatherOptions& options) override {
    return gather_all(OpType::GATHER, inputs, options.rootRank == getRank() ? outputs : std::vector<Tensors>{});
  }

  c10::intrusive_ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    check(tensors);
    const auto root = static_cast<int>(options.rootRank);
    auto flat = bytes(copied(tensors.at(0)));
    std::vector<std::pair<Tensor, Tensor>> results;
    if (root != getRank()) results.emplace_back(tensors[0], flat);
    return add(OpType::BROADCAST, flat.numel(), results,
               [flat, root](c10d::Backend& inner, InnerWorks&) { broadcast_now(inner, flat, root); });
  }

  c10::intrusive_ptr<c10d::Work> scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                         const c10d::ScatterOptions& options) override {
    check(outputs);
    const auto root = static_cast<int>(options.rootRank);
    const auto each = size_of(outputs.at(0));
    auto all = new_bytes(each * getSize());
    if (root == getRank()) {
      check(inputs.at(0));
      for (int64_t peer = 0; peer < getSize(); ++peer) all.narrow(0, peer * each, each).copy_(bytes(copied(inputs[0].at(peer))));
    }
    return add(OpType::SCATTER, each, {{outputs[0], all.narrow(0, getRank() * each, each)}},
               [all, root](c10d::Backend& inner, InnerWorks&) { broadcast_now(inner, all, root); });
  }

  // Sizes in bytes; what a pair of ranks exchanges may differ from pair to pair, so it is not compared.
  c10::intrusive_ptr<c10d::Work> exchange(OpType type, const Tensor& given, std::vector<int64_t> given_sizes,
                                          const Tensor& taken, std::vector<int64_t> taken_sizes,
                                          const std::vector<std::pair<Tensor, Tensor>>& results) {
    return add(type, 0, results, [=](c10d::Backend& inner, InnerWorks&) mutable {
      c10d::AllToAllOptions options;
      options.timeout = kForever;
      auto to = taken, from = given;
      inner.alltoall_base(to, from, taken_sizes, given_sizes, options)->wait(kForever);
    });
  }

  std::vector<int64_t> byte_sizes(const Tensor& tensor, const std::vector<int64_t>& splits) {
    std::vector<int64_t> sizes(getSize(), size_of(tensor) / getSize());
    if (splits.empty()) return sizes;
    const auto row = tensor.size(0) ? size_of(tensor) / tensor.size(0) : 0;
    for (int64_t peer = 0; peer < getSize(); ++peer) sizes[peer] = splits.at(peer) * row;
    return sizes;
  }

  c10::intrusive_ptr<c10d::Work> alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_splits,
                                               std::vector<int64_t>& input_splits,
                                               const c10d::AllToAllOptions&) override {
    check({input, output});
    auto taken = new_bytes(size_of(output));
    return exchange(OpType::ALLTOALL_BASE, bytes(copied(input)), byte_sizes(input, input_splits), taken,
                    byte_sizes(output, output_splits), {{output, taken}});
  }

  c10::intrusive_ptr<c10d::Work> alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    check(inputs);
    check(outputs);
    std::vector<int64_t> given_sizes, taken_sizes;
    int64_t given_total = 0, taken_total = 0;
    for (const auto& one : inputs) given_total += (given_sizes.push_back(size_of(one)), size_of(one));
    for (const auto& one : outputs) taken_total += (taken_sizes.push_back(size_of(one)), size_of(one));
    auto given = new_bytes(given_total), taken = new_bytes(taken_total);
    int64_t at = 0;
    for (const auto& one : inputs) {
      given.narrow(0, at, size_of(one)).copy_(bytes(copied(one)));
      at += size_of(one);
    }
    std::vector<std::pair<Tensor, Tensor>> results;
    at = 0;
    for (const auto& one : outputs) {
      results.emplace_back(one, taken.narrow(0, at, size_of(one)));
      at += size_of(one);
    }
    return exchange(OpType::ALLTOALL, given, given_sizes, taken, taken_sizes, results);
  }

  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override {
    check({});
    auto flag = at::empty({1}, at::TensorOptions(at::kByte)).zero_();
    return add(OpType::BARRIER, 1, {}, [flag](c10d::Backend& inner, InnerWorks&) {
      reduce_now(inner, flag, {c10d::ReduceOp::SUM});
    });
  }

  // NCCL knows no tags. One after the other for each pair; in a batch, together, and apart from those outside.
  c10::intrusive_ptr<c10d::Work> send(Tensors& tensors, int peer, int) override {
    check(tensors, true);
    auto flat = bytes(tensors.at(0).is_contiguous() ? copied(tensors[0]) : copied(tensors[0].contiguous()));
    return add(OpType::SEND, 0, {}, [flat, peer, tag = batch ? 1 : 0](c10d::Backend& inner, InnerWorks& started) {
      Tensors all{flat};
      started.push_back(inner.send(all, peer, tag));
    }, peer);
  }

  c10::intrusive_ptr<c10d::Work> recv(Tensors& tensors, int peer, int) override {
    check(tensors);
    auto flat = new_bytes(size_of(tensors.at(0)));
    return add(OpType::RECV, 0, {{tensors[0], flat}},
               [flat, peer, tag = batch ? 1 : 0](c10d::Backend& inner, InnerWorks& started) {
                 Tensors all{flat};
                 started.push_back(inner.recv(all, peer, tag));
               }, peer);
  }

  std::shared_ptr<Communicator> own;
  std::optional<Batch> batch;
  c10::DeviceIndex device_index = -1;
  uint64_t sequence = 0;
};

void* leave() { return PyGILState_Check() ? PyEval_SaveThread() : nullptr; }
void enter(void* state) { PyEval_RestoreThread(static_cast<PyThreadState*>(state)); }

}  // namespace

// Called with the GIL. ``ranks``: of the world; none: this is the group of the world.
extern "C" PyObject* standin_strict_backend(PyObject* inner, PyObject* name, PyObject* ranks, double timeout_seconds) {
  standin::leave_python = leave;
  standin::enter_python = enter;
  auto own = std::make_shared<Communicator>();
  own->inner = py::reinterpret_borrow<py::object>(inner).cast<c10::intrusive_ptr<c10d::Backend>>();
  own->name = py::reinterpret_borrow<py::object>(name).cast<std::string>();
  own->ranks = py::reinterpret_borrow<py::object>(ranks).cast<std::vector<int64_t>>();
  own->rank = own->inner->getRank();
  own->timeout = Millis(static_cast<int64_t>(timeout_seconds * 1000));
  if (own->ranks.empty()) {
    std::lock_guard<std::mutex> guard(counts_lock);
    counts_with.clear();
    for (int64_t rank = 0; rank < own->inner->getSize(); ++rank) own->ranks.push_back(rank);
  }
  watch_over(own);
  auto backend = c10::make_intrusive<Strict>(own, own->rank, own->inner->getSize());
  return py::cast(c10::static_intrusive_pointer_cast<c10d::Backend>(backend)).release().ptr();
}
