"""`mlx_parallm service`: a server that macOS starts at login and keeps running.

definition   what the service runs, and the files that say so: launchd's property list, and a unit for systemd
launchd      the calls of launchctl
command      the commands: install, uninstall, status
"""
