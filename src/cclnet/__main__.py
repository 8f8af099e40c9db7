from cclnet.cli import main

main()
