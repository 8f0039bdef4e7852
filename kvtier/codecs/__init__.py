"""How the bytes of one slice are written smaller. Lossless; a codec knows nothing of slots, files or tiers."""
