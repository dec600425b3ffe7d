"""What a mode would cost on this cluster: measured links, codecs and steps, put together by stated formulas."""
