"""Servers with a file of named keys."""

from mlx_parallm.server.access import Role, new_key, write_keys


def key_file(folder, **keys):
    """A file with these keys, and the headers that send each. `keys`: the role of each name, or (role, its limits)."""
    made = {}
    for name, given in keys.items():
        role, limits = given if isinstance(given, tuple) else (given, {})
        made[name] = new_key(name, Role(role), **limits)
    file = folder / "keys.json"
    write_keys(file, [key for key, _ in made.values()])
    return file, {name: {"authorization": f"Bearer {secret}"} for name, (_, secret) in made.items()}
