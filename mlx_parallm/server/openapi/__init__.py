"""The OpenAPI document: what routes declare (`responses`), example bodies (`examples`), and the whole (`document`)."""
