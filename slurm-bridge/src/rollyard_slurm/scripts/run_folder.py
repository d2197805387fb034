"""The bash lines that make the run folder of a node, which no other user of the node can reach or replace.

`rollyard_process.private_folder` does the same in Python for the worker. The script removes the folder
after a worker was killed. Therefore it must check the folder before it starts a worker. This module is pure.
"""

from __future__ import annotations

from typing import Final

from rollyard_slurm.scripts.shell import Code

_TEXT = r"""
# Another user of the node must not have made the folder before, nor be able to replace it: each folder
# on the way belongs to root or to this user, and is sticky where others can write to it.
private() {
  local part= word words paths=(/) uid gid raw mode owner=none
  IFS=/ read -r -d '' -a words < <(printf '%s\0' "${1#/}")
  for word in "${words[@]}"; do part+="/$word"; paths+=("$part"); done
  while read -r uid gid raw; do
    owner=$uid mode=$((16#$raw))
    [ "$uid" = 0 ] || [ "$uid" = "$UID" ] || return 1
    [ $((mode & 0170000)) -eq $((0040000)) ] || return 1
    [ $((mode & 0022)) -eq 0 ] || [ $((mode & 01000)) -ne 0 ] ||
      { [ $((mode & 0002)) -eq 0 ] && [ "$(id -gn):$gid" = "$(id -un):$(id -g)" ]; } || return 1
  done < <(stat -c '%u %g %f' -- "${paths[@]}" || echo none none 0)
  [ "$owner" = "$UID" ] && [ $((mode & 0077)) -eq 0 ]
}
mkdir -m 700 -- "$base" 2> /dev/null
if ! private "$base" || ! exec 8< "$base" || ! [ "$base" -ef /proc/self/fd/8 ]; then
  echo "error: $base cannot be used: another user can change it, or a folder on the way to it;" \
    "choose another workers.runDir" >&2
  exit 73
fi
# The last worker of this node removes the folder, and one that comes meanwhile makes it again.
for _ in 1 2 3 4 5; do
  mkdir -p -- "$run" && exec 9>> "/proc/self/fd/8/$node.lock" && flock -s -w 20 9 &&
    [ "$run.lock" -ef /proc/self/fd/9 ] && [ -O "$run" ] && break
done
[ -O "$run" ] || { echo "error: $run cannot be used" >&2; exit 73; }
exec 8<&-
trap 'flock -n -x 9 && rm -rf -- "$run" "$run.lock" && rmdir -- "${run%/*}" 2> /dev/null' EXIT
"""
RUN_FOLDER: Final = tuple(Code(line) for line in _TEXT.strip("\n").splitlines())
"""The lines of the script, which hold the lock of the folder as descriptor 9.

They need the variables `base`, which is a physical path, `node`, and `run`, which is `$base/$node`.
"""
