"""The papers' experiments, one file each, and the settings that they and users read from CONFIG.toml."""
