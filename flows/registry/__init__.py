"""The MLflow side: tracking, registration of gated models, promotion, rollback, and the served models."""
