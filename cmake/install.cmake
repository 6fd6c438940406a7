# SPDX-License-Identifier: Apache-2.0
# Installs the library, its headers and what find_package(kvstride) needs.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
install(TARGETS kvstride EXPORT kvstrideTargets
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/kvstride DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT kvstrideTargets NAMESPACE kvstride:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/kvstride
        FILE kvstrideConfig.cmake)
write_basic_package_version_file(kvstrideConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/kvstrideConfigVersion.cmake
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/kvstride)
