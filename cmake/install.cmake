# SPDX-License-Identifier: Apache-2.0
# Installs the library, its headers and what find_package(kvstride) needs.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
install(TARGETS kvstride EXPORT kvstrideTargets
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/kvstride DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT kvstrideTargets NAMESPACE kvstride:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/kvstride)
# The library is static: who links it links what it was built on.
if(KVSTRIDE_HAS_CUDA)
  set(cuda_dependency "find_dependency(CUDAToolkit)\n")
endif()
file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/kvstrideConfig.cmake
  "include(CMakeFindDependencyMacro)\nfind_dependency(hwy)\nfind_dependency(Threads)\n"
  "set(OPENSSL_USE_STATIC_LIBS TRUE)\nfind_dependency(OpenSSL COMPONENTS Crypto)\n${cuda_dependency}"
  "include(\"\${CMAKE_CURRENT_LIST_DIR}/kvstrideTargets.cmake\")\n")
write_basic_package_version_file(kvstrideConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/kvstrideConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/kvstrideConfigVersion.cmake
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/kvstride)
