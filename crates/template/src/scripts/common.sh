set -euo pipefail

# Fields of a user's line in /etc/passwd, by name or number.
user_line() {
  local name=${1%%:*} line
  while IFS= read -r line; do
    local login=${line%%:*} rest=${line#*:*:}
    if [[ $login == "$name" || ${rest%%:*} == "$name" ]]; then
      printf '%s\n' "$line"
      return 0
    fi
  done < /etc/passwd
  return 1
}

home_of() {
  local home
  home=$(user_line "$1" | cut -d: -f6) || true
  printf '%s\n' "${home:-/}"
}

# What chown takes: a user alone stands for its own group, too.
owner_of() {
  case $1 in
    *:*) printf '%s\n' "$1" ;;
    *[!0-9]*) printf '%s:\n' "$1" ;;
    *) printf '%s:%s\n' "$1" "$1" ;;
  esac
}

# make_dir PATH OWNER: all that has to be made for PATH is OWNER's.
make_dir() {
  local up=$1 top=
  while [[ ! -e $up ]]; do
    top=$up
    up=$(dirname -- "$up")
  done
  mkdir -p -- "$1"
  if [[ -n $top ]]; then
    chown -R -- "$2" "$top"
  fi
}

# absolute PATH WORKDIR USER: a relative path begins where the build stands, or at its user's home.
absolute() {
  case $1 in
    /*) printf '%s\n' "$1" ;;
    *) printf '%s/%s\n' "${2:-$(home_of "$3")}" "$1" ;;
  esac
}
