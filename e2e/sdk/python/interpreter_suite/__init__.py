"""E2B's code-interpreter SDK, unmodified, against a sandbox of our code-interpreter template.

Reads what the other suite reads, and AENV_INTERPRETER_TEMPLATE.
"""
