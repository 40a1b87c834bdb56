"""Commands of other launchers, understood: from the words of a guide to settings, variables and a script.

read_command(words, environ)          -> Command     `mpirun -f hosts -n 4 ... python3 run_qa.py ...`, and its kin
read_accelerate_file(path)            -> Meaning     the YAML that `accelerate config` writes
for_launch(command), for_train(command)              the script's own flags, for today's transformers or for us
"""
