"""Find good settings for a model: by simulation, and from measurements of the live model."""
