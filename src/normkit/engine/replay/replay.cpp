// A step of a layer, forward and backward, as lists of launches that were recorded before.
//
// Python decides what a layer launches: which kernels, on which grids, with which tables between
// them. For the next tensor of the same shape, type and layout it would decide the same, and for a
// small layer that takes longer than the kernels. Here a list is gone through in a microsecond a
// launch, and autograd's node is a C++ one.
//
// A tensor of a step has a slot: inputs first (x, residual, parameters, buffers; in a backward also
// the tables of the forward and the gradient), then what is allocated. Kernels are started through
// the CUDA driver, looked up when it is there; without it a launch calls back into Python, which is
// how the interpreter runs the same steps in tests. On a CPU a launch is a loop of engine/cpu.

#include <dlfcn.h>
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "../cpu/kernels.h"

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// cuLaunchKernelEx and what it takes, as in cuda.h, which need not be installed
struct alignas(8) CudaAttribute {
  int id;
  int value[17];  // after four bytes of padding, a union of 64
};

struct CudaConfig {
  unsigned grid[3], block[3], shared;
  void* stream;
  CudaAttribute* attributes;
  unsigned count;
};

using CudaLaunch = int (*)(const CudaConfig*, void*, void**, void**);

CudaLaunch cuda_launch() {
  static CudaLaunch found = [] {
    void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    return driver ? reinterpret_cast<CudaLaunch>(dlsym(driver, "cuLaunchKernelEx")) : nullptr;
  }();
  return found;
}

struct Allocation {
  bool like_x;    // of the input's shape, strides and type; else a flat table
  int64_t size;
  at::ScalarType type = at::kFloat;
};

struct Launch {
  uint64_t function = 0;             // 0: ``call`` is called instead
  std::vector<unsigned> grid;
  unsigned threads = 0, shared = 0;
  bool overlap = false;              // may start before the kernel in front has ended
  std::vector<std::pair<int, int64_t>> slots;  // of its tensors, -1 for None, and offsets
  std::vector<std::pair<char, double>> numbers;  // 'i' 32 bits, 'l' 64 bits, 'f' float, 'd' double
  py::object call;
  normkit::Kernel loop = nullptr;    // on a CPU: this is called, with
  std::vector<double> given;
};

struct Part {        // a part of an allocation, flat
  int slot = -1;     // -1: None
  int64_t offset = 0, size = 0;
};

struct Program {
  std::vector<Allocation> allocations;
  std::vector<Launch> launches;
};

struct Key {
  std::vector<int64_t> sizes, strides;
  at::ScalarType type;
  at::Device device{at::kCPU};
  bool training, needs_x, needs_residual;
  std::string activation;
  std::optional<at::ScalarType> residual;
};

// For kernels, which were compiled for such addresses; loops take any.
bool aligned(const Tensor& t) {
  return t.is_cpu() || (reinterpret_cast<uintptr_t>(t.data_ptr()) & 15) == 0;
}

// A tensor that was kept since a forward, as loops and kernels count on it: ``data = …`` may have
// put other memory under it meanwhile, which is no new version. Without ``strides`` it has no gaps.
Tensor as_it_was(const Tensor& t, at::Device device, at::ScalarType type, at::IntArrayRef sizes,
                 const std::vector<int64_t>* strides = nullptr) {
  const bool laid = strides ? t.strides() == at::IntArrayRef(*strides) : t.is_contiguous();
  if (laid && t.sizes() == sizes && t.scalar_type() == type && t.device() == device && aligned(t))
    return t;
  TORCH_CHECK(t.sizes() == sizes && t.device() == device, "normkit: a tensor of size ", sizes,
              " on ", device, " that a forward has kept has size ", t.sizes(), " on ", t.device(),
              " now; try to set its data after the backward");
  const auto like = at::TensorOptions().dtype(type).device(device);
  Tensor made = strides ? at::empty_strided(sizes, *strides, like) : at::empty(sizes, like);
  return made.copy_(t.detach());
}

struct Plan : torch::CustomClassHolder {
  Key key;
  std::vector<py::str> parameters, buffers;  // names
  std::vector<at::ScalarType> types;  // of both, in this order
  std::vector<std::vector<int64_t>> shapes;  // likewise: launches read and write so many entries
  Program forward, backward;
  std::optional<Program> remake;      // y from x, residual and tables, if the last launch is more
  bool unknown = false;               // it is more, and was recorded where nobody makes y again
  int y, tables;
  bool keeps_y = false;               // for the backward, which has it in the residual's slot
  bool keeps_x = true;                // else the backward does without it
  std::optional<bool> learned;        // whether a parameter gets a gradient, if that matters
  int gates = -1;                     // a second result, (rows, C), which has a gradient too
  int64_t rows = 0;                   // of it
  int dx, dresidual;                  // slots of the backward; -1: none, -2: the gradient itself
  std::vector<Part> gradients;        // of the parameters
  py::object again;                   // for a backward that someone looks into
  py::object report;                  // of a batch that was left out of the running statistics
  bool loops = false;                 // of a CPU, and not kernels
  int serves = 0;                     // forwards with gradients; 1: also without; 2: those alone
  std::vector<int> writes;            // slots of buffers that loops change

  Tensor like_x(const Tensor& kept, at::ScalarType type) const {
    return as_it_was(kept, key.device, type, key.sizes, &key.strides);
  }
  Tensor parameter(const Tensor& kept, size_t i) const {
    return as_it_was(kept, key.device, types[i], shapes[i]);
  }

  ~Plan() override {
    py::gil_scoped_acquire lock;      // launches and ``again`` hold objects of Python
    again = py::object();
    report = py::object();
    parameters.clear();
    buffers.clear();
    forward.launches.clear();
    backward.launches.clear();
    remake.reset();
  }
};

int8_t type_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat: return normkit::FLOAT;
    case at::kDouble: return normkit::DOUBLE;
    case at::kBFloat16: return normkit::BFLOAT16;
    case at::kLong: return normkit::INT64;
    default: TORCH_CHECK(false, "normkit: no loop computes in ", t.scalar_type());
  }
}

// Not while others wait for Python.
int loop(normkit::Kernel kernel, void* const* at, const int8_t* types, const double* numbers) {
  std::optional<py::gil_scoped_release> others;
  if (PyGILState_Check()) others.emplace();
  const int threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  return kernel({at, types, numbers, threads});
}

int loop(const Launch& launch, const std::vector<Tensor>& slots) {
  void* at[32];
  int8_t types[32];
  size_t count = 0;
  for (auto [slot, offset] : launch.slots) {
    const bool there = slot >= 0 && slots[slot].defined();
    at[count] = there ? static_cast<char*>(slots[slot].data_ptr()) +
                            offset * slots[slot].element_size()
                      : nullptr;
    types[count++] = there ? type_of(slots[slot]) : int8_t(normkit::NONE);
  }
  return loop(launch.loop, at, types, launch.given.data());
}

void start(const Launch& launch, const std::vector<Tensor>& slots, void* stream,
           bool alone = false) {
  if (!launch.function) {
    py::gil_scoped_acquire lock;
    py::list given;
    for (auto [slot, offset] : launch.slots)
      given.append(slot < 0 ? py::object(py::none())
                   : offset ? py::cast(slots[slot].flatten().slice(0, offset))
                            : py::cast(slots[slot]));
    launch.call(*py::tuple(given));
    return;
  }
  uint64_t values[64];
  void* pointers[64];
  size_t count = 0;
  for (auto [slot, offset] : launch.slots) {
    values[count] = slot < 0 ? 0
                             : reinterpret_cast<uint64_t>(slots[slot].data_ptr()) +
                                   offset * slots[slot].element_size();
    pointers[count] = &values[count];
    ++count;
  }
  for (const auto& [kind, number] : launch.numbers) {
    values[count] = 0;
    if (kind == 'f') {
      float value = static_cast<float>(number);
      std::memcpy(&values[count], &value, sizeof value);
    } else if (kind == 'd') {
      std::memcpy(&values[count], &number, sizeof number);
    } else {
      int64_t value = static_cast<int64_t>(number);
      std::memcpy(&values[count], &value, kind == 'i' ? 4 : 8);
    }
    pointers[count] = &values[count];
    ++count;
  }
  for (int scratch = 0; scratch < 2; ++scratch, ++count) {  // Triton's own, which are not used
    values[count] = 0;
    pointers[count] = &values[count];
  }
  CudaAttribute serialization{6, {0, 1}};  // programmatic stream serialization, allowed
  CudaConfig config{{launch.grid[0], launch.grid[1], launch.grid[2]}, {launch.threads, 1, 1},
                    launch.shared, stream, &serialization, launch.overlap && !alone ? 1u : 0u};
  int error =
      cuda_launch()(&config, reinterpret_cast<void*>(launch.function), pointers, nullptr);
  TORCH_CHECK(error == 0, "normkit: a kernel could not be started (CUDA driver error ", error, ")");
}

// Whether a batch was left out of the running statistics, where that is known.
int run(const Program& program, std::vector<Tensor>& slots, const Key& key, void* stream) {
  auto like = at::TensorOptions().dtype(key.type).device(key.device);
  for (const auto& a : program.allocations)
    slots.push_back(a.like_x ? at::empty_strided(key.sizes, key.strides, like)
                             : at::empty({a.size}, like.dtype(a.type)));
  int left_out = 0;
  for (const auto& launch : program.launches)
    if (launch.loop) left_out |= loop(launch, slots);
    else start(launch, slots, stream);
  return left_out;
}

// The output of a step once more, for whoever kept its input in its place: the last launch of its
// forward, which reads x, the residual and the tables, of loops also parameters, and writes y. If
// parameters have changed by then, the backward of the step itself is an error.
struct Remake {
  c10::intrusive_ptr<Plan> plan;
  Tensor tables;
  uint64_t stream;
  std::vector<Tensor> parameters;

  static bool possible(const Plan& plan) {
    if (plan.remake) return true;
    const int own = plan.loops ? int(plan.parameters.size()) : 0;
    for (auto [slot, offset] : plan.forward.launches.back().slots)
      if (slot > 1 + own && slot != plan.tables && slot != plan.y) return false;
    return true;
  }

  Tensor operator()(const Tensor& x, const std::optional<Tensor>& residual) const {
    const Key& key = plan->key;
    const int from = plan->remake ? 2 : plan->tables, to = plan->remake ? 3 : plan->y;
    std::vector<Tensor> slots(std::max(from, to) + 1);
    slots[0] = plan->like_x(x, key.type);
    if (residual) slots[1] = plan->like_x(*residual, *key.residual);
    if (plan->loops && !plan->remake)  // which has tables alone
      for (size_t i = 0; i < parameters.size(); ++i)
        slots[2 + i] = plan->parameter(parameters[i], i);
    slots[from] = tables;
    slots[to] = at::empty_strided(key.sizes, key.strides,
                                  at::TensorOptions().dtype(key.type).device(key.device));
    const Launch& last = (plan->remake ? *plan->remake : plan->forward).launches.back();
    // alone: recorded behind the layer's own kernels, it reads x before it waits for others
    if (last.loop) loop(last, slots);
    else start(last, slots, reinterpret_cast<void*>(stream), true);
    return slots[to];
  }
};

struct Results {  // of a forward, beside y
  Tensor tables;
  int left_out = 0;
};

// Inputs of autograd's node: the plan, the stream, x, residual, parameters, buffers, and where the
// results go; only those in the middle get gradients.
struct NormalizerStep : torch::autograd::Function<NormalizerStep> {
  static variable_list forward(AutogradContext* ctx, const c10::intrusive_ptr<Plan>& plan,
                        void* stream, const Tensor& x, const std::optional<Tensor>& residual,
                        at::TensorList parameters, const std::vector<Tensor>& buffers,
                        Results* results) {
    std::vector<Tensor> slots{x, residual ? *residual : Tensor()};
    slots.insert(slots.end(), parameters.begin(), parameters.end());
    slots.insert(slots.end(), buffers.begin(), buffers.end());
    for (int slot : plan->writes) slots[slot].unsafeGetTensorImpl()->bump_version();
    results->left_out = run(plan->forward, slots, plan->key, stream);
    const bool again = plan->key.activation != "none";  // the map is made again in the backward
    results->tables = slots[plan->tables];
    Tensor second = plan->keeps_y ? slots[plan->y] : again && residual ? *residual : Tensor();
    variable_list kept{plan->keeps_x ? x : Tensor(), second, slots[plan->tables]};
    kept.insert(kept.end(), parameters.begin(), parameters.end());
    ctx->save_for_backward(std::move(kept));
    ctx->saved_data["plan"] = c10::IValue::make_capsule(plan);
    ctx->saved_data["stream"] = reinterpret_cast<int64_t>(stream);
    ctx->set_materialize_grads(false);
    if (plan->gates < 0) return {slots[plan->y]};
    return {slots[plan->y], slots[plan->gates].view({plan->rows, -1})};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    auto capsule = ctx->saved_data["plan"].toCapsule();
    const Plan& plan = static_cast<const Plan&>(*capsule);
    const size_t count = plan.parameters.size();
    variable_list found(6 + count);
    Tensor grad = grads[0];
    Tensor grad_gates = plan.gates < 0 ? Tensor() : grads[1];
    if (!grad.defined() && !grad_gates.defined()) return found;
    variable_list kept = ctx->get_saved_variables();
    if (!grad.defined()) grad = at::zeros_like(kept[0]);  // steps with gates keep x
    std::vector<Tensor> slots{kept[0], kept[1]};
    slots.insert(slots.end(), kept.begin() + 3, kept.end());
    std::vector<bool> needs{plan.key.needs_x, plan.key.needs_residual};
    for (size_t i = 0; i < count; ++i) needs.push_back(slots[2 + i].requires_grad());
    auto impl = grad.unsafeGetTensorImpl();
    bool plain = grad.scalar_type() == plan.key.type && !impl->is_python_dispatch() &&
                 !impl->key_set().has(c10::DispatchKey::Batched) &&
                 !impl->key_set().has(c10::DispatchKey::ZeroTensor) && !grad.is_neg() &&
                 !impl->key_set().has(c10::DispatchKey::FuncTorchBatched);
    if (at::GradMode::is_enabled() || !plain) {
      look_into(plan, slots, kept[2], grad, grad_gates, needs, found);
      return found;
    }
    if (grad.strides() != at::IntArrayRef(plan.key.strides) || !aligned(grad)) {
      auto like = at::TensorOptions().dtype(plan.key.type).device(plan.key.device);
      Tensor copy = at::empty_strided(plan.key.sizes, plan.key.strides, like);
      copy.copy_(grad);
      grad = copy;
    }
    const auto second = plan.keeps_y ? plan.key.type : plan.key.residual.value_or(plan.key.type);
    if (slots[0].defined()) slots[0] = plan.like_x(slots[0], plan.key.type);
    if (slots[1].defined()) slots[1] = plan.like_x(slots[1], second);
    for (size_t i = 0; i < count; ++i) slots[2 + i] = plan.parameter(slots[2 + i], i);
    slots.push_back(kept[2]);
    slots.push_back(grad);
    if (plan.gates >= 0)
      slots.push_back(grad_gates.defined() ? grad_gates.contiguous() : Tensor());
    run(plan.backward, slots, plan.key,
        reinterpret_cast<void*>(ctx->saved_data["stream"].toInt()));
    if (needs[0] && plan.dx >= 0) found[2] = slots[plan.dx];
    if (needs[1] && plan.dresidual != -1)
      found[3] = plan.dresidual == -2 ? grad : slots[plan.dresidual];
    for (size_t i = 0; i < count; ++i) {
      const Part& part = plan.gradients[i];
      if (part.slot < 0 || !needs[2 + i]) continue;
      Tensor d = slots[part.slot];
      if (d.numel() != part.size) d = d.narrow(0, part.offset, part.size);
      if (d.sizes() != slots[2 + i].sizes()) d = d.view(slots[2 + i].sizes());
      found[4 + i] = d.scalar_type() == plan.types[i] ? d : d.to(plan.types[i]);
    }
    return found;
  }

  static void look_into(const Plan& plan, const std::vector<Tensor>& inputs, const Tensor& made,
                        const Tensor& grad, const Tensor& grad_gates,
                        const std::vector<bool>& needs, variable_list& found) {
    py::gil_scoped_acquire lock;
    py::list parameters;
    for (size_t i = 2; i < inputs.size(); ++i) parameters.append(py::cast(inputs[i]));
    py::object residual = inputs[1].defined() ? py::cast(inputs[1]) : py::object(py::none());
    py::list rest;  // the gradient of what else there is
    if (plan.gates >= 0)
      rest.append(grad_gates.defined() ? py::cast(grad_gates) : py::object(py::none()));
    py::object x = inputs[0].defined() ? py::cast(inputs[0]) : py::object(py::none());
    py::sequence given = plan.again(x, residual, parameters, py::cast(made),
                                    py::cast(grad), py::cast(needs), *py::tuple(rest));
    for (size_t i = 0; i < needs.size(); ++i)
      if (!given[i].is_none()) found[2 + i] = given[i].cast<Tensor>();
  }
};

// Tensors of a layer by name, if they are what they were.
bool collect(const py::dict& from, const std::vector<py::str>& names,
             const Plan& plan, size_t begin, std::vector<Tensor>& into) {
  for (size_t i = 0; i < names.size(); ++i) {
    PyObject* object = PyDict_GetItem(from.ptr(), names[i].ptr());
    if (!object || !THPVariable_Check(object)) return false;
    const Tensor& t = THPVariable_Unpack(object);
    if (t.scalar_type() != plan.types[begin + i] || t.device() != plan.key.device ||
        t.sizes() != at::IntArrayRef(plan.shapes[begin + i]) || !t.is_contiguous() ||
        t.unsafeGetTensorImpl()->is_python_dispatch() || !aligned(t))
      return false;
    into.push_back(t);
  }
  return true;
}

struct Replays {
  std::vector<c10::intrusive_ptr<Plan>> plans;

  // The layer's output, and with it its gates if they are wanted, or with ``remade`` how to make it
  // again; None where nothing was recorded for such an input.
  py::object forward(const Tensor& x, const std::optional<Tensor>& residual,
                     const std::string& activation, bool training, const py::dict& parameters,
                     const py::dict& buffers, uint64_t stream, bool loops, bool remade) const {
    for (auto plan : plans) {  // held: a loop lets other threads in, which may add to the plans
      const Key& key = plan->key;
      if (plan->loops != loops || key.training != training || key.sizes != x.sizes() ||
          key.strides != x.strides() ||
          key.type != x.scalar_type() || key.device != x.device() ||
          key.needs_x != x.requires_grad() || key.activation != activation ||
          key.residual.has_value() != residual.has_value() ||
          plan->serves == (at::GradMode::is_enabled() ? 2 : 0) || (remade && plan->unknown))
        continue;
      if (residual && (residual->strides() != at::IntArrayRef(key.strides) ||
                       residual->sizes() != at::IntArrayRef(key.sizes) ||
                       residual->scalar_type() != *key.residual ||
                       residual->requires_grad() != key.needs_residual ||
                       residual->device() != key.device || !aligned(*residual) ||
                       residual->is_neg() ||
                       residual->unsafeGetTensorImpl()->is_python_dispatch()))
        continue;
      if (!aligned(x) || x.is_neg() || (remade && !Remake::possible(*plan))) return py::none();
      std::vector<Tensor> own, kept;
      if (!collect(parameters, plan->parameters, *plan, 0, own) ||
          !collect(buffers, plan->buffers, *plan, plan->parameters.size(), kept))
        return py::none();
      if (plan->learned && at::GradMode::is_enabled()) {
        auto learns = [](const Tensor& t) { return t.requires_grad(); };
        if (*plan->learned != std::any_of(own.begin(), own.end(), learns) ||
            std::any_of(kept.begin(), kept.end(), learns))  // to which no step has a gradient
          continue;
      }
      Results results;
      auto made = NormalizerStep::apply(plan, reinterpret_cast<void*>(stream), x, residual,
                                        at::TensorList(own), kept, &results);
      if (results.left_out) plan->report();
      if (!remade && plan->gates >= 0) return py::make_tuple(made[0], made[1]);
      if (!remade) return py::cast(made[0]);
      py::object second = plan->gates >= 0 ? py::cast(made[1]) : py::object(py::none());
      return py::make_tuple(made[0], second, Remake{plan, results.tables, stream, own});
    }
    return py::none();
  }
};

normkit::Kernel named(const std::string& name) {
  normkit::Kernel found = normkit::kernel(name.c_str());
  TORCH_CHECK(found, "normkit: there is no loop of the name ", name);
  return found;
}

// One loop by itself, for passes whose coefficients are made by torch.
int call(const std::string& name, const std::vector<std::optional<Tensor>>& tensors,
         const std::vector<double>& numbers) {
  std::vector<void*> at;
  std::vector<int8_t> types;
  for (const auto& t : tensors) {
    at.push_back(t ? t->data_ptr() : nullptr);
    types.push_back(t ? type_of(*t) : int8_t(normkit::NONE));
  }
  return loop(named(name), at.data(), types.data(), numbers.data());
}

Program program(const py::dict& given) {
  Program made;
  for (auto item : given["allocations"]) {
    auto [like_x, size, type] = item.cast<std::tuple<bool, int64_t, at::ScalarType>>();
    made.allocations.push_back({like_x, size, type});
  }
  for (auto item : given["launches"]) {
    auto from = item.cast<py::dict>();
    Launch launch;
    if (from.contains("loop")) {
      launch.loop = named(from["loop"].cast<std::string>());
      launch.slots = from["slots"].cast<std::vector<std::pair<int, int64_t>>>();
      launch.given = from["numbers"].cast<std::vector<double>>();
      TORCH_CHECK(launch.slots.size() <= 32, "too many arguments");
      made.launches.push_back(std::move(launch));
      continue;
    }
    launch.function = from["function"].cast<uint64_t>();
    launch.grid = from["grid"].cast<std::vector<unsigned>>();
    launch.threads = from["threads"].cast<unsigned>();
    launch.shared = from["shared"].cast<unsigned>();
    launch.overlap = from["overlap"].cast<bool>();
    launch.slots = from["slots"].cast<std::vector<std::pair<int, int64_t>>>();
    launch.numbers = from["numbers"].cast<std::vector<std::pair<char, double>>>();
    launch.call = from["call"];
    TORCH_CHECK(launch.slots.size() + launch.numbers.size() <= 60, "too many arguments");
    TORCH_CHECK(!launch.function || cuda_launch(), "the CUDA driver was not found");
    made.launches.push_back(std::move(launch));
  }
  return made;
}

c10::intrusive_ptr<Plan> plan(const Tensor& x, const py::dict& given) {
  auto made = c10::make_intrusive<Plan>();
  Key& key = made->key;
  key.sizes = x.sizes().vec();
  key.strides = x.strides().vec();
  key.type = x.scalar_type();
  key.device = x.device();
  key.training = given["training"].cast<bool>();
  key.activation = given["activation"].cast<std::string>();
  key.needs_x = given["needs_x"].cast<bool>();
  key.needs_residual = given["needs_residual"].cast<bool>();
  if (!given["residual"].is_none()) key.residual = given["residual"].cast<Tensor>().scalar_type();
  for (auto item : given["parameters"]) made->parameters.push_back(item.cast<py::str>());
  for (auto item : given["buffers"]) made->buffers.push_back(item.cast<py::str>());
  for (auto item : given["tensors"]) {
    Tensor tensor = item.cast<Tensor>();
    made->types.push_back(tensor.scalar_type());
    made->shapes.push_back(tensor.sizes().vec());
  }
  made->forward = program(given["forward"]);
  made->backward = program(given["backward"]);
  if (given.contains("remake")) {
    if (given["remake"].is_none()) made->unknown = true;
    else made->remake = program(given["remake"]);
  }
  made->y = given["y"].cast<int>();
  made->tables = given["tables"].cast<int>();
  made->keeps_y = given["keeps_y"].cast<bool>();
  made->dx = given["dx"].cast<int>();
  made->dresidual = given["dresidual"].cast<int>();
  for (auto item : given["gradients"]) {
    auto part = item.cast<std::tuple<int, int64_t, int64_t>>();
    made->gradients.push_back({std::get<0>(part), std::get<1>(part), std::get<2>(part)});
  }
  made->again = given["again"];
  if (given.contains("keeps_x")) made->keeps_x = given["keeps_x"].cast<bool>();
  if (given.contains("learned")) made->learned = given["learned"].cast<bool>();
  if (given.contains("serves")) made->serves = given["serves"].cast<int>();
  made->loops = given.contains("report");
  if (made->loops) {
    made->report = given["report"];
    made->writes = given["writes"].cast<std::vector<int>>();
    made->gates = given["gates"].cast<int>();
    made->rows = given["rows"].cast<int64_t>();
  }
  return made;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("call", &call);
  py::class_<Remake>(m, "Remake").def("__call__", &Remake::operator());
  py::class_<Replays>(m, "Replays")
      .def(py::init<>())
      .def("add", [](Replays& self, const Tensor& x, const py::dict& given) {
        self.plans.push_back(plan(x, given));
      })
      .def("__len__", [](const Replays& self) { return self.plans.size(); })
      .def("__call__", &Replays::forward);
}
