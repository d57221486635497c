"""One page with what came of an experiment: findings, pictures, tables; nothing from elsewhere."""
