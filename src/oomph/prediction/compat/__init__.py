"""What a prediction must know about libraries and tools that programs use: one file for each.

A file has one `Library`; the rest of `prediction` names none, and calls registry.py. To add one, write its
file, its row in `registry.LIBRARIES`, and a test with the program that needed it.
"""
