# Makes the one header that is installed: kvclient.h with the headers that it includes in their
# places.  cmake -DINCLUDE=DIR -DPROTO=DIR -DOUT=FILE -P single_header.cmake
function(inline_header text_name include_line file)
    file(READ ${file} inner)
    string(REGEX REPLACE "^/\\* [a-z_]+\\.h - " "/* " inner "${inner}")
    string(FIND "${${text_name}}" "${include_line}" place)
    if(place EQUAL -1)
        message(FATAL_ERROR "single_header: ${file}: nothing includes it: ${include_line}")
    endif()
    string(REPLACE "${include_line}\n" "${inner}" text "${${text_name}}")
    set(${text_name} "${text}" PARENT_SCOPE)
endfunction()

file(READ ${INCLUDE}/kvclient.h header)
inline_header(header "#include \"proto/kv_types.h\"" ${PROTO}/kv_types.h)
inline_header(header "#include \"proto/kv_status.h\"" ${PROTO}/kv_status.h)
inline_header(header "#include \"client/include/kvclient_nodes.h\"" ${INCLUDE}/kvclient_nodes.h)
if(header MATCHES "#include \"")
    message(FATAL_ERROR "single_header: kvclient.h: a header is left that is not installed: "
        "${CMAKE_MATCH_0}")
endif()
file(WRITE ${OUT} "${header}")
