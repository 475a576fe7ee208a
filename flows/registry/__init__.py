"""The MLflow side: tracking, registration, promotion, rollback, and the served models.

Whatever asks the registry raises ``RlhfError`` in one line where that does not answer.
"""
