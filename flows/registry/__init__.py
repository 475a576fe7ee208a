"""The MLflow side: tracking, registration of gated models, promotion, rollback, and the served
models.

Whatever asks the registry raises ``RlhfError`` in one line where that does not answer.
"""
