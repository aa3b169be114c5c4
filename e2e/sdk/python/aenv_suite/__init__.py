"""Smoke suite: the official E2B Python SDK, unmodified, against a running AgentENV server.

Reads E2B_API_URL, E2B_SANDBOX_URL and E2B_API_KEY (as the SDK does) and AENV_TEMPLATE, the template to start from.
Standard library and the SDK only.
"""
