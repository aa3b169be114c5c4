# What every template has, as far as the image has the means for it.
if ! user_line user > /dev/null; then
  if command -v useradd > /dev/null; then
    useradd -m -s /bin/bash user
  else
    adduser -D -s /bin/bash user
  fi
fi
if [[ -d /etc/sudoers.d && ! -e /etc/sudoers.d/user ]]; then
  printf 'user ALL=(ALL:ALL) NOPASSWD: ALL\n' > /etc/sudoers.d/user
  chmod 0440 /etc/sudoers.d/user
fi
mkdir -p /code /usr/local
chmod 0777 /code /usr/local
