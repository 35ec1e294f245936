// SPDX-License-Identifier: Apache-2.0
// A device for PyTorch's key PrivateUse1 that shows what a missing wait does. late_device.py describes it.
//
// An operation is queued on a stream, which is a thread, and computed later by torch's CPU kernels. Memory is mapped
// twice: tensors have the addresses of a mapping that cannot be touched, and the threads use the other one.

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>

namespace {

using at::Tensor;
using Ticket = int64_t;  // Of a stream: how many tasks it has been given up to and with this one.

constexpr auto kPatience = std::chrono::milliseconds(500);
const c10::Device kDevice(c10::DeviceType::PrivateUse1, 0);

// ---- streams ------------------------------------------------------------------------------------------------

struct Task {
  std::string name;
  std::function<void()> run;
  int64_t other = -1;  // The stream to wait for, up to `ticket`.
  Ticket ticket = 0;
};

// When a stream begins its next task.
enum Pace : int64_t {
  kRandom = 0,  // After a pause of random length.
  kHeld = 1,    // When the host waits for it, or for a stream that waits for it.
  kPrompt = 2,  // At once: the host goes on when it has ended, or waits for another stream.
};

struct Lane {
  std::condition_variable work;  // Its thread may find something to do.
  std::deque<Task> queue;
  Ticket given = 0, done = 0;
  Ticket wanted = 0;  // The host waits, if only through other streams, for the tasks up to this one.
  bool blocked = false;
  bool calls = false;  // It has collectives, for which the hosts of other processes may wait.
  int64_t pace = kRandom;

  bool is_wanted() const { return wanted > done; }
};

struct Device {
  std::mutex mutex;
  std::condition_variable changed;  // A task has ended, or waits; somebody waits for a task.
  std::deque<Lane> lanes;
  int64_t pace = kRandom;  // Of streams to come.
  int64_t pause = 0;       // Microseconds, at most.
  bool logs = false;
  bool is_poor = false;  // Without float64 and frexp.
  std::vector<std::string> log, waits;
  std::exception_ptr error;
};

// Never destroyed: its threads run until the process ends.
Device& device() {
  static Device* it = new Device;
  return *it;
}

thread_local int64_t current = 0;

void want(int64_t stream, Ticket ticket) {
  auto& lane = device().lanes[stream];
  if (lane.wanted < ticket) {
    lane.wanted = ticket;
    lane.work.notify_one();
    device().changed.notify_all();
  }
}

// Waits until the host wants a stream to go on. Hosts of other processes cannot say so: for them it goes on in the end.
template <typename Condition>
void wait_until_wanted(
    std::unique_lock<std::mutex>& lock, std::condition_variable& changed, Lane& lane, Condition may_go_on) {
  while (!may_go_on()) {
    if (!lane.calls) {
      changed.wait(lock);
    } else if (changed.wait_for(lock, kPatience) == std::cv_status::timeout && lane.given > lane.done) {
      lane.wanted = std::max(lane.wanted, lane.done + 1);
    }
  }
}

// Runs the task that is first in the queue of a stream.
void serve_one(std::unique_lock<std::mutex>& lock, Lane& lane, std::mt19937& random, int64_t stream) {
  auto& all = device();
  auto task = std::move(lane.queue.front());
  lane.queue.pop_front();
  if (task.other >= 0) {
    auto& other = all.lanes[task.other];
    lane.blocked = true;
    all.changed.notify_all();
    wait_until_wanted(lock, all.changed, lane, [&] {
      return other.done >= task.ticket || lane.is_wanted() || lane.pace == kRandom;
    });
    want(task.other, task.ticket);
    all.changed.wait(lock, [&] { return other.done >= task.ticket; });
    lane.blocked = false;
    return;
  }
  auto pause = lane.pace == kRandom && all.pause ? random() % all.pause : 0;
  lock.unlock();
  std::exception_ptr error;
  if (pause) std::this_thread::sleep_for(std::chrono::microseconds(pause));
  try {
    task.run();
  } catch (...) {
    error = std::current_exception();
  }
  task.run = nullptr;
  lock.lock();
  if (error && !all.error) all.error = error;
  if (all.logs) all.log.push_back(std::to_string(stream) + " " + task.name);
}

void serve(int64_t stream) {
  at::set_num_threads(1);
  std::mt19937 random(static_cast<unsigned>(stream));
  auto& all = device();
  std::unique_lock<std::mutex> lock(all.mutex);
  auto& lane = all.lanes[stream];
  while (true) {
    wait_until_wanted(lock, lane.work, lane, [&] {
      return !lane.queue.empty() && (lane.pace != kHeld || lane.is_wanted());
    });
    serve_one(lock, lane, random, stream);
    ++lane.done;
    all.changed.notify_all();
  }
}

int64_t new_lane() {
  auto& all = device();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto number = static_cast<int64_t>(all.lanes.size());
  all.lanes.emplace_back();
  all.lanes.back().pace = all.pace;
  std::thread(serve, number).detach();
  return number;
}

// The threads of a process begin with the first use of the device in it, so that a process may fork before.
void start() {
  static std::once_flag once;
  std::call_once(once, [] { new_lane(); });
}

void give(int64_t stream, Task task) {
  start();
  auto& all = device();
  std::unique_lock<std::mutex> lock(all.mutex);
  auto& lane = all.lanes[stream];
  lane.calls = lane.calls || task.name == "call";
  lane.queue.push_back(std::move(task));
  auto ticket = ++lane.given;
  lane.work.notify_one();
  if (lane.pace == kPrompt && !lane.calls) {
    all.changed.wait(lock, [&] { return lane.done >= ticket || lane.blocked || lane.pace != kPrompt; });
  }
}

void give(int64_t stream, std::string name, std::function<void()> run) {
  give(stream, Task{std::move(name), std::move(run)});
}

Ticket given(int64_t stream) {
  start();
  std::lock_guard<std::mutex> lock(device().mutex);
  return device().lanes[stream].given;
}

void raise_error() {
  if (auto error = std::exchange(device().error, nullptr)) std::rethrow_exception(error);
}

void (*watcher)() = nullptr;  // Called where the host waits for the device.

void wait_for(int64_t stream, Ticket ticket) {
  auto& all = device();
  std::unique_lock<std::mutex> lock(all.mutex);
  want(stream, ticket);
  all.changed.wait(lock, [&] { return all.lanes[stream].done >= ticket; });
  raise_error();
}

void synchronize(int64_t stream, Ticket ticket) {
  if (watcher) watcher();
  wait_for(stream, ticket);
}

void synchronize(int64_t stream) { synchronize(stream, given(stream)); }

bool is_done(int64_t stream, Ticket ticket) {
  std::lock_guard<std::mutex> lock(device().mutex);
  want(stream, ticket);  // Whoever asks again and again waits, too.
  return device().lanes[stream].done >= ticket;
}

std::vector<Ticket> all_given() {
  std::vector<Ticket> result;
  std::lock_guard<std::mutex> lock(device().mutex);
  for (auto& lane : device().lanes) result.push_back(lane.given);
  return result;
}

void synchronize_all() {
  start();
  if (watcher) watcher();
  auto tickets = all_given();
  for (size_t stream = 0; stream < tickets.size(); ++stream) wait_for(static_cast<int64_t>(stream), tickets[stream]);
}

// ---- memory -------------------------------------------------------------------------------------------------

constexpr size_t kBytes = size_t(8) << 30;

struct Block {
  size_t nbytes;
  int64_t stream;            // On which it was allocated, and is used again without a wait.
  std::set<int64_t> others;  // Streams that record_stream has named.
  std::map<int64_t, Ticket> until;
};

struct Arena {
  char *untouchable, *touchable;
  size_t used = 0, in_use = 0, peak = 0;
  std::mutex mutex;
  std::map<void*, Block> blocks;
  std::map<std::pair<int64_t, size_t>, std::vector<void*>> free;
  std::vector<void*> waiting;  // Free, but named by record_stream.

  Arena() {
    int file = memfd_create("late", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, kBytes) == 0, "no memory for the device");
    auto map = [&](int access) { return mmap(nullptr, kBytes, access, MAP_SHARED | MAP_NORESERVE, file, 0); };
    void *first = map(PROT_NONE), *second = map(PROT_READ | PROT_WRITE);
    TORCH_CHECK(first != MAP_FAILED && second != MAP_FAILED, "no memory for the device");
    untouchable = static_cast<char*>(first);
    touchable = static_cast<char*>(second);
  }
};

Arena& arena() {
  static Arena* it = new Arena;
  return *it;
}

void* touchable(const void* data) {
  auto& all = arena();
  return all.touchable + (static_cast<const char*>(data) - all.untouchable);
}

void free_block(void* data) {
  auto& all = arena();
  std::map<int64_t, Ticket> until;
  std::unique_lock<std::mutex> lock(all.mutex);
  auto& block = all.blocks.at(data);
  for (auto other : block.others) block.until[other] = given(other);
  block.others.clear();
  all.in_use -= block.nbytes;
  if (block.until.empty()) {
    all.free[{block.stream, block.nbytes}].push_back(data);
  } else {
    all.waiting.push_back(data);
  }
}

struct Memory final : c10::Allocator {
  // As a caching allocator does it: freed memory serves the next request on its stream at once, though operations that
  // use it may be queued still. The last use of it is a task here: it fills the memory with NaN.
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, kDevice};
    start();
    size_t size = 512;
    while (size < nbytes) size *= 2;
    auto& all = arena();
    void* data = nullptr;
    {
      std::lock_guard<std::mutex> lock(all.mutex);
      auto still = std::exchange(all.waiting, {});
      for (auto one : still) {
        auto& block = all.blocks.at(one);
        bool done = true;
        {
          std::lock_guard<std::mutex> lanes(device().mutex);
          for (auto [stream, ticket] : block.until) done = done && device().lanes[stream].done >= ticket;
        }
        if (done) block.until.clear();
        (done ? all.free[{block.stream, block.nbytes}] : all.waiting).push_back(one);
      }
      auto& found = all.free[{current, size}];
      if (!found.empty()) {
        data = found.back();
        found.pop_back();
      } else {
        TORCH_CHECK(all.used + size <= kBytes, "the device is out of memory");
        data = all.untouchable + all.used;
        all.used += size;
        all.blocks[data] = Block{size, current, {}, {}};
      }
      all.in_use += size;
      all.peak = std::max(all.peak, all.in_use);
    }
    give(current, "earlier use", [data, nbytes] { std::memset(touchable(data), 0xff, nbytes); });
    return {data, data, &free_block, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    give(current, "copy", [=] { std::memcpy(touchable(to), touchable(from), nbytes); });
  }
};

Memory memory;

void record_block(const void* base, int64_t stream) {
  auto& all = arena();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto found = all.blocks.find(const_cast<void*>(base));
  if (found != all.blocks.end() && found->second.stream != stream) found->second.others.insert(stream);
}

// Page-locked host memory: streams read and write it at any time after the call. Freed memory is used again when no
// stream can use it any more.
struct Pinned {
  std::mutex mutex;
  std::map<const char*, size_t> sizes;
  std::vector<std::pair<char*, std::vector<Ticket>>> waiting;
};

Pinned& pinned() {
  static Pinned* it = new Pinned;
  return *it;
}

bool is_pinned(const void* data) {
  auto& all = pinned();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto next = all.sizes.upper_bound(static_cast<const char*>(data));
  if (next == all.sizes.begin()) return false;
  auto [start, nbytes] = *std::prev(next);
  return data < start + nbytes;
}

void free_pinned(void* data) {
  auto tickets = all_given();
  auto& all = pinned();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.sizes.erase(static_cast<char*>(data));
  all.waiting.emplace_back(static_cast<char*>(data), std::move(tickets));
  auto still = std::exchange(all.waiting, {});
  for (auto& [start, until] : still) {
    bool done = true;
    {
      std::lock_guard<std::mutex> lanes(device().mutex);
      for (size_t stream = 0; stream < until.size(); ++stream) done = done && device().lanes[stream].done >= until[stream];
    }
    if (done) {
      std::free(start);
    } else {
      all.waiting.emplace_back(start, std::move(until));
    }
  }
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 4096, std::max<size_t>(nbytes, 1)) == 0, "no memory to pin");
    auto& all = pinned();
    std::lock_guard<std::mutex> lock(all.mutex);
    all.sizes[static_cast<char*>(data)] = std::max<size_t>(nbytes, 1);
    return {data, data, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }
};

PinnedMemory pinned_memory;

// ---- what torch asks a device for -----------------------------------------------------------------------------

struct Mark {
  int64_t stream;
  Ticket ticket;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream of(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return of(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return of(0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    start();
    return of(new_lane());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return of(std::exchange(current, stream.id())); }
  bool queryStream(const c10::Stream& stream) const override { return is_done(stream.id(), given(stream.id())); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(stream.id()); }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronize_all(); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Mark;
    *static_cast<Mark*>(*event) = Mark{stream.id(), given(stream.id())};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    auto mark = *static_cast<Mark*>(event);
    if (mark.stream != stream.id()) give(stream.id(), Task{"wait", nullptr, mark.stream, mark.ticket});
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    auto mark = *static_cast<Mark*>(event);
    return is_done(mark.stream, mark.ticket);
  }
  void synchronizeEvent(void* event) const override {
    if (event) synchronize(static_cast<Mark*>(event)->stream, static_cast<Mark*>(event)->ticket);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Mark*>(event); }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0.0; }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_block(data.get_context(), stream.id());
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

Tensor host_alias(const Tensor& tensor);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Device getDeviceFromPtr(void*) const override { return kDevice; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto fresh = memory.allocate(size);
    auto kept = std::min(size, storage.nbytes());
    if (kept) memory.copy_data(fresh.mutable_get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

Hooks hooks;

// ---- tensors --------------------------------------------------------------------------------------------------

void refuse(c10::ScalarType dtype) {
  TORCH_CHECK_TYPE(dtype != c10::kDouble || !device().is_poor, "this device does not support float64");
}

Tensor empty(
    at::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, std::optional<c10::Device>,
    std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  refuse(c10::dtype_or_default(dtype));
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &memory, keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device>, std::optional<bool>) {
  refuse(c10::dtype_or_default(dtype));
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &memory, keys, c10::dtype_or_default(dtype));
}

Tensor empty_like(const Tensor& tensor) {
  return empty_strided(tensor.sizes(), tensor.strides(), tensor.scalar_type(), {}, {}, {});
}

bool is_ours(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
}

// A CPU tensor on the same memory. It does not keep the memory.
Tensor host_alias(const Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(c10::kCPU);
  c10::InferenceMode off(false);
  auto data = tensor.numel() ? touchable(tensor.const_data_ptr()) : nullptr;
  auto result = at::from_blob(data, tensor.sizes(), tensor.strides(), options);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) result.unsafeGetTensorImpl()->set_wrapped_number(true);
  return result;
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<c10::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  auto nbytes = (self.storage_offset() + self.numel()) * self.element_size();
  if (static_cast<size_t>(nbytes) > self.storage().nbytes()) hooks.resizePrivateUse1Bytes(self.storage(), nbytes);
  return self;
}

Tensor& set_part(Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(size, stride, offset);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  auto count = static_cast<int64_t>(source.nbytes() / self.element_size());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(0);
  impl->set_sizes_contiguous({count});
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_part(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_empty(Tensor& self) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(empty({0}, self.scalar_type(), {}, {}, {}, {}).storage());
  impl->set_storage_offset(0);
  impl->set_sizes_contiguous(at::IntArrayRef({0}));
  return self;
}

void record_stream(Tensor& self, c10::Stream stream) {
  record_block(self.storage().data_ptr().get_context(), stream.id());
}

// ---- copies and operations --------------------------------------------------------------------------------------

// The kernels of a task see no autograd.
void compute(const std::function<void()>& run) {
  at::AutoDispatchBelowADInplaceOrView below;
  run();
}

void give_copy(const Tensor& from, const Tensor& to) {
  give(current, "copy", [from, to] { compute([&] { to.copy_(from); }); });
}

bool is_same_layout(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
      a.is_non_overlapping_and_dense();
}

// A view of page-locked memory that does not keep it: its allocator does, until no stream uses it.
Tensor host_view(const Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().pinned_memory(false));
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  if (target.numel() == 0) return target;
  at::AutoDispatchBelowADInplaceOrView below;
  if (is_ours(source) && is_ours(target)) {
    give_copy(host_alias(source), host_alias(target));
  } else if (is_ours(target)) {
    // From pageable memory a driver takes a copy before it returns.
    bool late = non_blocking && is_pinned(source.const_data_ptr()) && is_same_layout(source, target);
    give_copy(late ? host_view(source) : source.expand_as(target).clone(), host_alias(target));
    if (!non_blocking) synchronize(current);
  } else if (non_blocking && is_pinned(target.const_data_ptr()) && is_same_layout(source, target)) {
    give_copy(host_alias(source), host_view(target));
  } else {
    synchronize(current);
    target.copy_(host_alias(source));
  }
  return target;
}

at::Scalar local_scalar(const Tensor& self) {
  synchronize(current);
  return at::_local_scalar_dense(host_alias(self));
}

// Operands of a task: its tensors as CPU tensors on the same memory. CPU scalars and indices go by value.
Tensor operand(const Tensor& tensor, const std::string& name) {
  if (!tensor.defined()) return tensor;
  if (is_ours(tensor)) return host_alias(tensor);
  TORCH_CHECK(
      tensor.dim() == 0 || name.find("index") != std::string::npos, name,
      ": expected all tensors to be on the same device, but found one on ", tensor.device());
  auto result = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) result.unsafeGetTensorImpl()->set_wrapped_number(true);
  return result;
}

Tensor meta(const Tensor& tensor) {
  if (!is_ours(tensor)) return tensor;
  return at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
}

c10::IValue mapped(const c10::IValue& value, const std::function<Tensor(const Tensor&)>& of) {
  if (value.isTensor()) return of(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> result;
    for (const auto& one : value.toTensorVector()) result.push_back(of(one));
    return result;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> result;
    for (const auto& one : value.toOptionalTensorVector()) {
      result.push_back(one ? std::optional<Tensor>(of(*one)) : std::nullopt);
    }
    return result;
  }
  return value;
}

std::vector<Tensor> tensors_of(const c10::IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  if (value.isTensorList()) return value.toTensorVector();
  return {};
}

void copy_results(const torch::jit::Stack& from, const std::vector<std::optional<c10::IValue>>& to) {
  for (size_t index = 0; index < to.size(); ++index) {
    if (!to[index]) continue;
    auto sources = tensors_of(from[index]), targets = tensors_of(*to[index]);
    for (size_t one = 0; one < targets.size(); ++one) {
      if (targets[one].defined()) targets[one].copy_(sources[one]);
    }
  }
}

// Runs an operation on meta tensors, which tells the shapes of its results and of the outputs that it resizes; false if
// they depend on values.
bool run_on_meta(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  try {
    op.callBoxed(&stack);
  } catch (const std::exception&) {
    return false;
  }
  return std::all_of(stack.begin(), stack.end(), [](const c10::IValue& value) {
    return value.isNone() || value.isTensor() || value.isTensorList();
  });
}

void any_operation(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  auto name = schema.operator_name().name;
  bool is_lacking = device().is_poor && name.find("frexp") != std::string::npos;
  TORCH_CHECK_NOT_IMPLEMENTED(!is_lacking, name, " has no kernel on this device");
  auto count = schema.arguments().size();
  torch::jit::Stack given(stack->end() - count, stack->end()), sketch, late;
  at::AutoDispatchBelowADInplaceOrView below;
  for (const auto& value : given) {
    bool is_device = value.isDevice();
    sketch.push_back(is_device ? c10::IValue(c10::Device(c10::kMeta)) : mapped(value, meta));
  }
  auto shapes = sketch;
  bool known = run_on_meta(op, shapes);
  if (known && name == "aten::native_layer_norm") {  // A CPU's statistics have the dtype of the input.
    for (size_t index : {1, 2}) shapes[index] = shapes[index].toTensor().to(sketch[0].toTensor().scalar_type());
  }
  std::vector<c10::IValue> results;
  std::vector<std::optional<c10::IValue>> targets;
  auto fresh = [](const Tensor& like) { return like.defined() ? empty_like(like) : like; };
  for (size_t index = 0; known && index < count; ++index) {
    const auto* alias = schema.arguments()[index].alias_info();
    if (!alias || !alias->isWrite() || !given[index].isTensor()) continue;
    auto output = given[index].toTensor(), wanted = sketch[index].toTensor();
    if (is_ours(output) && output.sizes() != wanted.sizes()) resize_(output, wanted.sizes(), {});
  }
  auto by_name = [&](const Tensor& tensor) { return operand(tensor, name); };
  // Outputs are computed in memory of the host's and then copied, as a kernel may resize them more than once.
  auto blank = [](const Tensor& like) { return at::empty({0}, at::TensorOptions().dtype(like.scalar_type())); };
  std::vector<std::pair<size_t, Tensor>> outputs;
  for (size_t index = 0; index < count; ++index) {
    const auto& argument = schema.arguments()[index];
    const auto& value = given[index];
    bool is_output = argument.kwarg_only() && argument.alias_info() && argument.alias_info()->isWrite();
    if (is_output && value.isTensor() && is_ours(value.toTensor())) {
      late.push_back(blank(value.toTensor()));
      outputs.emplace_back(index, host_alias(value.toTensor()));
    } else {
      late.push_back(value.isDevice() ? c10::IValue(c10::Device(c10::kCPU)) : mapped(value, by_name));
    }
  }
  auto run = [op, outputs](torch::jit::Stack& stack) {
    auto arguments = stack;
    op.callBoxed(&stack);
    for (auto& [index, target] : outputs) target.copy_(arguments[index].toTensor());
  };
  if (!known) {
    synchronize(current);
    {
      std::lock_guard<std::mutex> lock(device().mutex);
      device().waits.push_back(name);
    }
    run(late);
  }
  for (size_t index = 0; index < schema.returns().size(); ++index) {
    const auto* alias = schema.returns()[index].alias_info();
    TORCH_CHECK_NOT_IMPLEMENTED(!alias || alias->isWrite(), name, " is a view that this device lacks");
    if (alias) {  // One of the arguments.
      for (size_t one = 0; one < count; ++one) {
        const auto* of_argument = schema.arguments()[one].alias_info();
        if (of_argument && *of_argument == *alias) results.push_back(given[one]);
      }
      targets.push_back(std::nullopt);
    } else {
      const auto& like = known ? shapes[index] : late[index];
      bool has_tensors = like.isTensor() || like.isTensorList();
      results.push_back(has_tensors ? mapped(like, fresh) : like);
      targets.push_back(std::nullopt);
      if (has_tensors) targets.back() = mapped(results.back(), [](const Tensor& tensor) {
        return tensor.defined() ? host_alias(tensor) : tensor;
      });
    }
  }
  if (known) {
    give(current, name, [run, late, targets]() mutable {
      compute([&] {
        run(late);
        copy_results(late, targets);
      });
    });
  } else {
    give(current, name, [late, targets] { compute([&] { copy_results(late, targets); }); });
  }
  torch::jit::drop(*stack, count);
  for (auto& result : results) stack->push_back(std::move(result));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_part);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_empty);
  m.impl("record_stream", record_stream);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", local_scalar);
  // So that `model.to` and `param.data = ` keep the parameter.
  m.impl("_has_compatible_shallow_copy_type", [](const Tensor&, const Tensor&) { return true; });
  // Elsewhere these are composed of others; on CPUs they have kernels, which round differently.
  for (auto name :
       {"_fused_adam_", "_fused_adamw_", "_stack", "addr", "mish_backward", "native_group_norm", "native_layer_norm",
        "silu_backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&any_operation>());
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operation>());
}

// ---- what the tests ask for ---------------------------------------------------------------------------------------

void set_pace(at::IntArrayRef streams, int64_t pace) {
  start();
  auto& all = device();
  std::lock_guard<std::mutex> lock(all.mutex);
  for (auto stream : streams) {
    all.lanes.at(stream).pace = pace;
    all.lanes.at(stream).work.notify_one();
  }
  all.changed.notify_all();
}

void set_default_pace(int64_t pace, int64_t pause) {
  std::lock_guard<std::mutex> lock(device().mutex);
  device().pace = pace;
  device().pause = pause;
}

int64_t count_streams() {
  start();
  std::lock_guard<std::mutex> lock(device().mutex);
  return static_cast<int64_t>(device().lanes.size());
}

void set_logging(bool on) {
  std::lock_guard<std::mutex> lock(device().mutex);
  device().logs = on;
}

std::vector<std::string> taken(std::vector<std::string> Device::* which) {
  std::lock_guard<std::mutex> lock(device().mutex);
  return std::exchange(device().*which, {});
}

TORCH_LIBRARY(late, m) {
  m.def("start() -> ()", [] {
    c10::SetAllocator(c10::DeviceType::PrivateUse1, &memory);
    at::RegisterPrivateUse1HooksInterface(&hooks);
  });
  m.def("set_pace(int[] streams, int pace) -> ()", set_pace);
  m.def("set_default_pace(int pace, int pause) -> ()", set_default_pace);
  m.def("count_streams() -> int", count_streams);
  m.def("set_logging(bool on) -> ()", set_logging);
  m.def("set_poor(bool on) -> ()", [](bool on) { device().is_poor = on; });
  m.def("log() -> str[]", [] { return taken(&Device::log); });
  m.def("waits() -> str[]", [] { return taken(&Device::waits); });
  m.def("mark(str name) -> ()", [](std::string name) { give(current, std::move(name), [] {}); });
  m.def("memory() -> int[]", [] {
    std::lock_guard<std::mutex> lock(arena().mutex);
    return std::vector<int64_t>{static_cast<int64_t>(arena().in_use), static_cast<int64_t>(arena().peak)};
  });
  m.def("host_alias(Tensor tensor) -> Tensor");
}

TORCH_LIBRARY_IMPL(late, PrivateUse1, m) { m.impl("host_alias", host_alias); }

}  // namespace

// Queues a call of a function of Python's on a stream, as a collective does.
extern "C" void late_call(int64_t stream, void (*function)(int64_t), int64_t argument) {
  give(stream, "call", [=] { function(argument); });
}

// Calls a function of Python's where the host waits for the device; null: no longer.
extern "C" void late_watch(void (*function)()) { watcher = function; }
