# SPDX-License-Identifier: Apache-2.0
# The kernel and the calls of the CUDA runtime, or a stub that says that they are not there.
set(use_cuda ${KVSTRIDE_CUDA})
if(use_cuda STREQUAL "AUTO")
  if(NOT CMAKE_CUDA_COMPILER)
    unset(CMAKE_CUDA_COMPILER CACHE)  # it may have come since
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  set(use_cuda ${CMAKE_CUDA_COMPILER})
endif()
if(NOT use_cuda)
  target_sources(kvstride PRIVATE src/cuda/no_cuda.cpp)
  return()
endif()
# Ampere, Hopper, Blackwell, and PTX for what comes after them.
set(KVSTRIDE_CUDA_ARCHITECTURES 80-real 90-real 100-real 120 CACHE STRING "As CMAKE_CUDA_ARCHITECTURES")
if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES ${KVSTRIDE_CUDA_ARCHITECTURES})
endif()
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
set_target_properties(kvstride PROPERTIES CUDA_ARCHITECTURES "${CMAKE_CUDA_ARCHITECTURES}" CUDA_STANDARD 20)
target_sources(kvstride PRIVATE src/cuda/cudart.cpp src/cuda/kernels.cu)
# Values are converted as on the CPU: a product and a sum are rounded one after the other.
set_source_files_properties(src/cuda/kernels.cu PROPERTIES COMPILE_OPTIONS
  "--expt-relaxed-constexpr;-fmad=false;$<$<BOOL:${KVSTRIDE_WERROR}>:-Werror=all-warnings>")
target_include_directories(kvstride SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
target_link_libraries(kvstride PRIVATE CUDA::cudart_static)
set(KVSTRIDE_HAS_CUDA TRUE)
