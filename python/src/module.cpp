// SPDX-License-Identifier: Apache-2.0
// The extension module: errors, and the parts of the binding.
#include "module.h"

using kvstride::Error;
using kvstride::ErrorCode;

namespace {

const char* class_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::kArgument: return "ArgumentError";
    case ErrorCode::kLayout: return "LayoutError";
    case ErrorCode::kAmbiguous: return "AmbiguousLayout";
    case ErrorCode::kUnknown: return "UnknownLayout";
    case ErrorCode::kNotStrided: return "NotStrided";
    case ErrorCode::kBlockIndex: return "BlockIndexError";
    case ErrorCode::kDType: return "DTypeError";
    case ErrorCode::kStore: return "StoreError";
    case ErrorCode::kDevice: return "DeviceError";
  }
  return "Error";
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    const nb::object type = nb::module_::import_("kvstride.errors").attr(class_of(error.code()));
    std::string message = error.what();
    for (char& c : message) c = c == '\n' || c == '\r' ? ' ' : c;  // names may come from anywhere
    nb::object instance = type(message);
    if (error.column() != 0) instance.attr("column") = error.column();
    PyErr_SetObject(type.ptr(), instance.ptr());
  }
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "The C++ library of kvstride.";
  nb::set_leak_warnings(false);  // modules may keep registry entries until the interpreter ends
  nb::register_exception_translator(translate);
  def_plain(
      m, "version", [] { return std::string(kvstride::version()); }, "def version() -> str",
      "Version of the C++ library.");
  def_plain(m, "cuda_built", &kvstride::cuda_built, "def cuda_built() -> bool",
            "Whether the CUDA back end was compiled.");
  bind_layouts(m);
  bind_detect(m);
  bind_blocks(m);
  bind_attention(m);
  bind_identity(m);
  bind_engine(m);
  bind_store(m);
  bind_store_command(m);
}
