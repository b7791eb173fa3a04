"""Build native libraries with the machine's C++ compiler, once, into the cache folder.

cpp   finds the compiler, runs it, and keeps one file per sources, compiler and flags
"""
